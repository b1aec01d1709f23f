// Stand-ins for the CUDA functions in a build without CUDA. Each throws.

#include <stdexcept>

#include "masked_embedding.h"
#include "random.h"
#include "reduce_shards.h"
#include "split_cross_entropy.h"

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
void split_cross_entropy_cuda(void*, Dtype, const void*, const int64_t*, const void*,
                              const ClassSplit&, void*) {
  built_without_cuda();
}
void split_cross_entropy_backward_cuda(void*, Dtype, const void*, const int64_t*, const void*,
                                       const void*, const ClassSplit&, void*) {
  built_without_cuda();
}
void masked_embedding_cuda(void*, Dtype, const void*, const int64_t*, double, const RowWindow&,
                           int64_t, void*) {
  built_without_cuda();
}
void masked_embedding_backward_cuda(void*, Dtype, const void*, const LookUps&, double, bool,
                                    const RowWindow&, void*) {
  built_without_cuda();
}
void reduce_shards_cuda(void*, void*, Dtype, const Parts&, const Epilogue&, const RowsOfSlice&,
                        void*) {
  built_without_cuda();
}

}  // namespace consistent
