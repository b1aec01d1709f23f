// Reductions over the threads of a block; every thread gets the result.

#pragma once

namespace consistent {

constexpr int kWarp = 32;

// Reduces `value` over the block by combine(a, b), in one fixed order. `shared` has a slot for each
// warp, and is not that of the reduction before this one, whose slots threads may still read: two
// that take turns are enough. All threads must call it; blockDim.x is a multiple of 32.
template <class V, class Combine>
__device__ __forceinline__ V block_reduce(V value, V* shared, const Combine& combine) {
  // The shuffles inside `shuffled` synchronise the warp: no lane gets a value before it is made.
  for (int step = kWarp / 2; step > 0; step /= 2) {
    value = combine(value, value.shuffled(step));
  }
  const int warp = threadIdx.x / kWarp, warps = blockDim.x / kWarp;
  if (threadIdx.x % kWarp == 0) shared[warp] = value;
  // Without it a thread would read the slots of other warps before they are written.
  __syncthreads();
  value = shared[0];
  for (int w = 1; w < warps; ++w) value = combine(value, shared[w]);
  return value;
}

// A value that block_reduce sums.
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
