// Random values on CUDA: one thread runs one Philox block of one run of the box and writes those of
// its elements that lie inside the run. Threads share nothing. The mathematics is in
// distributions.h, as on the CPU.

#include <algorithm>

#include "check.h"
#include "distributions.h"
#include "launch.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // beyond it, a thread takes several turns

// Where a thread's Philox block lies: its element l has local index `at + l`; those in [first,
// last) lie inside the run.
struct Place {
  uint64_t block;
  int64_t at;
  int first, last;
};

__host__ __device__ inline int64_t blocks_in_run(const Box& box, int per_block) {
  return (box.run + per_block - 2) / per_block + 1;  // enough wherever in a block the run begins
}

template <int kPerBlock>
__device__ __forceinline__ Place place_of(const Box& box, int64_t blocks, int64_t index) {
  const int64_t r = index / blocks, j = index - r * blocks;
  const int64_t start = box.run_start(r);
  const int64_t block = start / kPerBlock + j;
  const int64_t inside = block * kPerBlock - start;
  const int64_t left = box.run - inside;
  return Place{uint64_t(block), r * box.run + inside, inside < 0 ? int(-inside) : 0,
               left < kPerBlock ? int(left) : kPerBlock};
}

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

template <class T, int kCount>
__device__ __forceinline__ void write(T* out, const Place& place, const Pack<T, kCount>& values) {
  T* to = out + place.at;
  const bool aligned = reinterpret_cast<uintptr_t>(to) % sizeof(values) == 0;
  if (place.first == 0 && place.last == kCount && aligned) {
    *reinterpret_cast<Pack<T, kCount>*>(to) = values;
    return;
  }
#pragma unroll
  for (int lane = 0; lane < kCount; ++lane) {
    if (lane >= place.first && lane < place.last) to[lane] = values.value[lane];
  }
}

__device__ __forceinline__ void words_of(Draw draw, uint64_t block, uint32_t words[4]) {
  philox(draw, uint32_t(block), uint32_t(block >> 32), words);
}

__device__ __forceinline__ int64_t first_index() {
  return int64_t(blockIdx.x) * kThreads + threadIdx.x;
}
__device__ __forceinline__ int64_t index_step() { return int64_t(gridDim.x) * kThreads; }

template <class F, class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* out, F f, Draw draw, Box box) {
  using Word = typename F::Word;
  constexpr int kCount = 16 / sizeof(Word);
  const int64_t blocks = blocks_in_run(box, kCount), total = blocks * box.runs;
  for (int64_t index = first_index(); index < total; index += index_step()) {
    const Place place = place_of<kCount>(box, blocks, index);
    if (place.last <= place.first) continue;
    uint32_t raw[4];
    words_of(draw, place.block, raw);
    Word words[kCount];
    memcpy(words, raw, sizeof(raw));
    Pack<T, kCount> values;
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      typename F::Value a, b;
      f(words[i], words[i + 1], a, b);
      values.value[i] = Storage<T>::store(a);
      values.value[i + 1] = Storage<T>::store(b);
    }
    write(out, place, values);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    bernoulli_kernel(T* out, const double* p, Draw draw, Box box) {
  const int64_t blocks = blocks_in_run(box, 4), total = blocks * box.runs;
  for (int64_t index = first_index(); index < total; index += index_step()) {
    const Place place = place_of<4>(box, blocks, index);
    if (place.last <= place.first) continue;
    uint32_t words[4];
    words_of(draw, place.block, words);
    Pack<T, 4> values = {};
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      if (lane < place.first || lane >= place.last) continue;
      const double chance = p[place.at + lane] * 0x1p32;
      values.value[lane] = Storage<T>::store(double(words[lane]) < chance ? 1 : 0);
    }
    write(out, place, values);
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* out, const T* x, Dropout dropout, Draw draw, Box box) {
  const int64_t blocks = blocks_in_run(box, 4), total = blocks * box.runs;
  const Real<T> scale = Real<T>(dropout.scale);
  for (int64_t index = first_index(); index < total; index += index_step()) {
    const Place place = place_of<4>(box, blocks, index);
    if (place.last <= place.first) continue;
    uint32_t words[4];
    words_of(draw, place.block, words);
    Pack<T, 4> values = {};
    const T* from = x + place.at;
    const bool aligned = reinterpret_cast<uintptr_t>(from) % sizeof(values) == 0;
    const bool whole = place.first == 0 && place.last == 4;
    if (whole && aligned) values = *reinterpret_cast<const Pack<T, 4>*>(from);
#pragma unroll
    for (int lane = 0; lane < 4; ++lane) {
      if (lane < place.first || lane >= place.last) continue;
      if (!(whole && aligned)) values.value[lane] = from[lane];
      const Real<T> factor = words[lane] <= dropout.last ? scale : Real<T>(0);
      values.value[lane] = Storage<T>::store(Storage<T>::load(values.value[lane]) * factor);
    }
    write(out, place, values);
  }
}

unsigned grid_for(const Box& box, int per_block) {
  const int64_t threads = blocks_in_run(box, per_block) * box.runs;
  return unsigned(std::min<int64_t>((threads + kThreads - 1) / kThreads, kMostBlocks));
}

struct LaunchFill {
  void* out;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class F, class T>
  void operator()(F f, T) const {
    const unsigned grid = grid_for(box, 16 / sizeof(typename F::Word));
    launch({grid, kThreads, 0, stream}, fill_kernel<F, T>, static_cast<T*>(out), f, draw, box);
  }
};

struct LaunchBernoulli {
  void* out;
  const double* p;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    launch({grid_for(box, 4), kThreads, 0, stream}, bernoulli_kernel<T>, static_cast<T*>(out), p,
           draw, box);
  }
};

struct LaunchDropout {
  void* out;
  const void* x;
  Dropout dropout;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    launch({grid_for(box, 4), kThreads, 0, stream}, dropout_kernel<T>, static_cast<T*>(out),
           static_cast<const T*>(x), dropout, draw, box);
  }
};

}  // namespace

void fill_cuda(void* out, Dtype dtype, Distribution distribution, Draw draw, const Box& box,
               void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit(dtype, distribution, LaunchFill{out, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void bernoulli_cuda(void* out, Dtype dtype, const double* p, Draw draw, const Box& box,
                    void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit_type(dtype, LaunchBernoulli{out, p, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void dropout_cuda(void* out, Dtype dtype, const void* x, Dropout dropout, Draw draw, const Box& box,
                  void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit_float_type(dtype,
                   LaunchDropout{out, x, dropout, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
