// Where kernels are launched, and what else nvcc writes with syntax of its own. So the same sources
// compile with nvcc and with the compiler of the CPU, which runs them in tests/emulator.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <type_traits>

namespace consistent {

// The largest grid of a kernel, beyond which a block takes several turns. The tests set another
// one, so that few blocks have to do.
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

// Starts kernel(given...). What the launch itself reports is in cudaGetLastError().
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

// Declares `name`, a pointer or array, as the shared memory that a launch gives to each block.
#ifdef __CUDACC__
#define CONSISTENT_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#else
#define CONSISTENT_DYNAMIC_SHARED(type, name) \
  type* name = static_cast<type*>(::emulator::dynamic_shared())
#endif
