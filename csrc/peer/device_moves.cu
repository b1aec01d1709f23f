// The moves of device_moves.h as kernels, one launch each.
//
//   copy, for k in 0 .. peers - 1, for i in 0 .. bytes of box k - 1:
//     to[k][i] = from[k][i]
//   reduce, for i in 0 .. numbers of a box - 1:
//     t = W(boxes[0][i])  // W: float32 for two-byte floats, else the numbers' own type
//     for k in 1 .. peers - 1: t = t op W(boxes[k][i])  // integers wrap; a NaN stays
//     out[i] = T(t)  // the only rounding to T
//
// A thread moves 16 bytes at a time where all addresses are aligned. In a copy, blockIdx.x is the
// peer. Blocks start in the order of blockIdx.x first, so all peers are read at the same time, and
// no rank's memory has to serve all the others at once.
//
// The kernels contain no synchronization: each thread writes elements that no other thread reads or
// writes. The caller orders the kernels with the work of other GPUs by two barriers: one before the
// launch, after which the peers' slots are written, and one before the slots are written again,
// after which all ranks have read them.

#include <algorithm>

#include "../kernels/check.h"
#include "../kernels/launch.cuh"
#include "device_walk.h"

namespace consistent::peer {
namespace {

constexpr int kThreads = 256;

// Resident blocks per multiprocessor, for numbers of type T. With more blocks, a thread has too few
// registers to load from eight peers before the first addition, and ptxas loads from one at a time.
template <class T>
constexpr int kBlocksAtOnce = sizeof(T) == 1 ? 3 : 4;
constexpr int64_t kMostBlocks = most_blocks(2048);  // per peer; for more units, threads loop

unsigned blocks_for(int64_t units) {
  return unsigned(std::min((units + kThreads - 1) / kThreads, kMostBlocks));
}

template <int kBytes>
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Boxes to, const __grid_constant__ Boxes from) {
  const Rows& source = from.rows[blockIdx.x];
  const Rows& target = to.rows[blockIdx.x];
  const uint32_t units = uint32_t(source.row * source.count / kBytes);
  const uint32_t step = gridDim.y * kThreads;
  // In 64 bits: i + step may pass 2^32.
  for (uint64_t i = blockIdx.y * kThreads + threadIdx.x; i < units; i += step) {
    copy_unit<kBytes>(target, source, uint32_t(i));
  }
}

template <class T, int kCount, Op kOp>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>)
    reduce_kernel(char* out, const __grid_constant__ Boxes boxes, uint32_t units) {
  const uint32_t step = gridDim.x * kThreads;
  for (uint64_t i = blockIdx.x * kThreads + threadIdx.x; i < units; i += step) {
    reduce_unit<T, kCount, kOp>(out, boxes, uint32_t(i));
  }
}

}  // namespace

void copy_boxes_cuda(const Boxes& to, const Boxes& from, void* stream) {
  int64_t most = 0;
  for (int k = 0; k < from.count; ++k) most = std::max(most, from.rows[k].bytes());
  if (most == 0) return;
  visit_unit(unit_of(to, from), [&](auto bytes) {
    const dim3 grid(unsigned(from.count), blocks_for(most / bytes));
    launch({grid, kThreads, 0, static_cast<cudaStream_t>(stream)},
           copy_kernel<decltype(bytes)::value>, to, from);
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void reduce_boxes_cuda(void* out, const Boxes& boxes, Type type, Op op, void* stream) {
  const int64_t all = boxes.rows[0].bytes();
  if (all == 0) return;
  const int unit = reinterpret_cast<uintptr_t>(out) % 16 == 0 ? unit_of(boxes) : 1;
  visit_reduction(type, op, unit, [&](auto number, auto count, auto kind) {
    using T = decltype(number);
    constexpr int kCount = decltype(count)::value;
    constexpr Op kOp = decltype(kind)::value;
    const int64_t units = all / int64_t(sizeof(T) * kCount);
    launch({blocks_for(units), kThreads, 0, static_cast<cudaStream_t>(stream)},
           reduce_kernel<T, kCount, kOp>, static_cast<char*>(out), boxes, uint32_t(units));
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent::peer
