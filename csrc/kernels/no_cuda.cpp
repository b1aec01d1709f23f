// The CUDA names of a build without CUDA.

#include <stdexcept>

#include "random.h"

namespace consistent {
namespace {

[[noreturn]] void built_without_cuda() {
  throw std::runtime_error(
      "consistent: this tensor is on CUDA, but the native code was built without CUDA; rebuild "
      "with "
      "a torch that has CUDA and nvcc on the path: CONSISTENT_CUDA=1 pip install "
      "--no-build-isolation -e .");
}

}  // namespace

void fill_cuda(void*, Dtype, Distribution, Draw, const Box&, void*) { built_without_cuda(); }
void bernoulli_cuda(void*, Dtype, const double*, Draw, const Box&, void*) { built_without_cuda(); }
void dropout_cuda(void*, Dtype, const void*, Dropout, Draw, const Box&, void*) {
  built_without_cuda();
}

}  // namespace consistent
