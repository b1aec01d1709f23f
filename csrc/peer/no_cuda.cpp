// Stand-ins for the CUDA functions in a build without CUDA. Each throws.

#include <stdexcept>

#include "blocks.h"
#include "device_moves.h"

namespace consistent::peer {
namespace {

[[noreturn]] void built_without_cuda() {
  throw std::runtime_error(
      "mirrored: this tensor is on CUDA, but the native code was built without CUDA; rebuild with "
      "a torch that has CUDA and nvcc on the path: CONSISTENT_CUDA=1 pip install "
      "--no-build-isolation -e .");
}

}  // namespace

void copy_boxes_cuda(const Boxes&, const Boxes&, void*) { built_without_cuda(); }
void reduce_boxes_cuda(void*, const Boxes&, Type, Op, void*) { built_without_cuda(); }
void write_blocks_cuda(uint8_t*, const void*, void*, Dtype, int64_t, Code, void*) {
  built_without_cuda();
}
void read_blocks_cuda(void*, const void*, const uint8_t* const*, int, Dtype, int64_t, Code, void*) {
  built_without_cuda();
}

}  // namespace consistent::peer
