// Kernel launches, and the other places where nvcc has its own syntax. With these wrappers the same
// sources compile with nvcc and with the host compiler, which runs them in tests/emulator.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace consistent {

// The largest grid of a kernel; for more work, blocks loop. Tests define CONSISTENT_MOST_BLOCKS as
// a small number, so that these loops run more than once.
#ifdef CONSISTENT_MOST_BLOCKS
constexpr int64_t most_blocks(int64_t) { return CONSISTENT_MOST_BLOCKS; }
#else
constexpr int64_t most_blocks(int64_t usual) { return usual; }
#endif

struct Grid {
  dim3 blocks;
  unsigned threads;     // of a block
  size_t shared_bytes;  // of a block, besides those of its __shared__ variables
  cudaStream_t stream;
};

// Launches kernel(given...). An error of the launch itself is in cudaGetLastError(), which the
// caller checks. common_type_t keeps `given` out of the deduction, so arguments may convert.
template <class... Wanted>
void launch(const Grid& grid, void (*kernel)(Wanted...),
            const std::common_type_t<Wanted>&... given) {
#ifdef __CUDACC__
  kernel<<<grid.blocks, grid.threads, grid.shared_bytes, grid.stream>>>(given...);
#else
  emulator::launch(grid.blocks, grid.threads, grid.shared_bytes, kernel, given...);
#endif
}

}  // namespace consistent

// Declares `name`, an array (with nvcc) or pointer, as the dynamic shared memory of the block.
#ifdef __CUDACC__
#define CONSISTENT_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#else
#define CONSISTENT_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::emulator::dynamic_shared())
#endif
