// Reductions over the threads of a block. Every thread gets the result.

#pragma once

namespace consistent {

constexpr int kWarp = 32;

// Reduces `value` over the block by combine(a, b), in a fixed order, so every launch gives the same
// bits. All threads must call it, and blockDim.x is a multiple of 32. `shared` has one slot per
// warp. It must not be the array of the reduction before this one, which other threads may still be
// reading; two arrays that alternate are enough, since the barrier below separates their uses.
template <class V, class Combine>
__device__ __forceinline__ V block_reduce(V value, V* shared, const Combine& combine) {
  // The __shfl_xor_sync inside `shuffled` synchronizes the warp, so this needs no __syncwarp.
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = combine(value, value.shuffled(step));
  }
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) shared[warp] = value;
  // Without the barrier a thread would read the slots of other warps before they are written.
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < warps; ++w) value = combine(value, shared[w]);
  return value;
}

// A number in the form that block_reduce needs: with a member `shuffled`.
template <class R>
struct Sum {
  R value;
  __device__ __forceinline__ Sum shuffled(int step) const {
    return Sum{__shfl_xor_sync(0xFFFFFFFFu, value, step)};
  }
};

template <class R>
__device__ __forceinline__ R block_sum(R value, Sum<R>* shared) {
  const auto add = [](Sum<R> a, Sum<R> b) { return Sum<R>{a.value + b.value}; };
  return block_reduce(Sum<R>{value}, shared, add).value;
}

}  // namespace consistent
