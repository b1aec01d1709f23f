// Cross-entropy of split classes on CUDA.
//
//   for row in rows:  // all in R
//     m = largest R(x[c]) that is not NaN, or -inf;  r = m == -inf ? 0 : m
//     for c in 0 .. held - 1: total += exp(R(x[c]) - r)
//       if smooth: weighted += w[c] * (R(x[c]) - r);  weights += w[c]
//     statistics[row] = m, total, held here ? R(x[target - start]) : 0, weighted, weights
//   for row in rows, for c in 0 .. held - 1:  // backward; 0 if scale, shift and pick are all 0
//     g = exp(R(x[c]) - r) * scale;  g = g - shift * w[c]
//     gradient[row][c] = T(c == target - start ? g - pick : g)  // the only rounding to T
//
// exp is approximate_exponential(). The order of the sums is that of the threads, so their bits are
// not those of the CPU, which adds chunks in R and the chunks' sums in double.
//
// A block reads a row once, 64 bytes per thread at a time. It keeps the largest logit so far and
// the sum of exponentials relative to that logit, and rescales the sum when it meets a larger one
// (online softmax). If the classes of a row are not contiguous (inner > 1), the lanes of a warp
// take adjacent rows.

#include <algorithm>
#include <cmath>
#include <type_traits>

#include "approximate.h"
#include "block.cuh"
#include "check.h"
#include "launch.cuh"
#include "split_cross_entropy.h"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 256;
// Of a block that sums up a row: blocks of four warps end one after the other, so that some load
// while others reduce.
constexpr int kRowThreads = 128;
// Its resident blocks per multiprocessor: they leave a thread 64 registers, or 80 for double.
template <class T>
constexpr int kRowBlocks = sizeof(T) == 8 ? 6 : 8;
constexpr int kTogether = 4;  // packs of a row that a thread loads before it uses the first
// Resident blocks per multiprocessor where rows are strided: leaves a thread 80 registers, or 128
// for double.
template <class T>
constexpr int kBlocksAtOnce = sizeof(T) == 8 ? 2 : 3;
constexpr int kGroups = kThreads / kWarp;
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // of a grid; for more rows, blocks loop

template <class R>
__device__ __forceinline__ R least() {
  return -R(INFINITY);
}

// The statistics of the part of a row that was read so far. `total` and `weighted` are relative to
// reference(), which is 0 as long as all logits are -inf: -inf - -inf would be NaN.
template <class R>
struct Row {
  R largest, total, weighted, weights;

  static __device__ __forceinline__ Row empty() { return Row{least<R>(), R(0), R(0), R(0)}; }
  __device__ __forceinline__ R reference() const { return largest == least<R>() ? R(0) : largest; }

  // Raises `largest` to `seen` and makes the sums relative to it.
  __device__ __forceinline__ void raise(R seen) {
    if (!(seen > largest)) return;  // for a NaN too, which add() brings into the sums
    const R before = reference(), was = largest;
    largest = seen;
    if (was != least<R>()) total *= approximate_exponential(R(before - seen));
    if (weights != R(0)) weighted += weights * (before - seen);
  }

  __device__ __forceinline__ void add(R x, R w, bool smooth) {
    total += approximate_exponential(R(x - reference()));
    if (!smooth) return;
    weighted += w * (x - reference());
    weights += w;
  }

  __device__ __forceinline__ Row shuffled(int step) const {
    constexpr unsigned kAll = 0xFFFFFFFFu;
    return Row{__shfl_xor_sync(kAll, largest, step), __shfl_xor_sync(kAll, total, step),
               __shfl_xor_sync(kAll, weighted, step), __shfl_xor_sync(kAll, weights, step)};
  }
};

struct Join {
  template <class R>
  __device__ __forceinline__ Row<R> operator()(Row<R> a, Row<R> b) const {
    a.raise(b.largest);
    b.raise(a.largest);
    return Row<R>{a.largest, a.total + b.total, a.weighted + b.weighted, a.weights + b.weights};
  }
};

template <class T>
__device__ __forceinline__ void write_row(Real<T>* statistics, int64_t row, const Row<Real<T>>& r,
                                          const T* x, const int64_t* target,
                                          const ClassSplit& split) {
  using R = Real<T>;
  const int64_t rows = split.outer * split.inner, place = target[row] - split.start;
  const bool here = place >= 0 && place < split.held;
  R* to = statistics + row;
  to[0] = r.largest;
  to[rows] = r.total;
  to[2 * rows] = here ? R(Storage<T>::load(x[place * split.inner])) : R(0);
  if (!split.smooth) return;
  to[3 * rows] = r.weighted;
  to[4 * rows] = r.weights;
}

// One block per row, whose classes are contiguous. kSmooth is split.smooth: without it the loops
// have no weights.
template <class T, bool kSmooth>
__global__ void __launch_bounds__(kRowThreads, kRowBlocks<T>)
    forward_rows(Real<T>* statistics, const T* logits, const int64_t* target, const Real<T>* weight,
                 ClassSplit split) {
  using R = Real<T>;
  constexpr int kCount = kPackOf<T>;
  __shared__ Row<R> shared[2][kRowThreads / kWarp];
  const auto weight_of = [&](int64_t c) { return kSmooth && weight != nullptr ? weight[c] : R(1); };
  int turn = 0;
  for (int64_t row = blockIdx.x; row < split.outer; row += gridDim.x) {
    const T* x = logits + row * split.held;
    Row<R> mine = Row<R>::empty();
    const auto one = [&](int64_t c) {
      const R value = Storage<T>::load(x[c]);
      mine.raise(value);
      mine.add(value, weight_of(c), kSmooth);
    };
    const int64_t head = head_of(x, split.held), packs = (split.held - head) / kCount;
    for (int64_t c = threadIdx.x; c < head; c += kRowThreads) one(c);
    // Adds this thread's packs p, p + kRowThreads, ... (`together` of them). All are loaded before
    // the first is used, and the sums are rescaled at most once.
    const auto several = [&](int64_t p, auto together) {
      constexpr int kHere = decltype(together)::value;
      Loaded<PackOf<T>> read[kHere];
      Pack<R, kCount> values[kHere];
      R top = least<R>();
#pragma unroll
      for (int k = 0; k < kHere; ++k) {
        read[k] = load<PackOf<T>>(x + head + (p + k * kRowThreads) * kCount);
      }
#pragma unroll
      for (int k = 0; k < kHere; ++k) {
        values[k] = widened(read[k].pack());
#pragma unroll
        for (int j = 0; j < kCount; ++j) top = fmax(top, values[k].value[j]);
      }
      mine.raise(top);
#pragma unroll
      for (int k = 0; k < kHere; ++k) {
        const int64_t c = head + (p + k * kRowThreads) * kCount;
#pragma unroll
        for (int j = 0; j < kCount; ++j) mine.add(values[k].value[j], weight_of(c + j), kSmooth);
      }
    };
    int64_t p = threadIdx.x;
    for (; p + (kTogether - 1) * kRowThreads < packs; p += kTogether * kRowThreads) {
      several(p, std::integral_constant<int, kTogether>());
    }
    for (; p < packs; p += kRowThreads) several(p, std::integral_constant<int, 1>());
    for (int64_t c = head + packs * kCount + threadIdx.x; c < split.held; c += kRowThreads) one(c);
    mine = block_reduce(mine, shared[turn ^= 1], Join());
    if (threadIdx.x == 0) write_row(statistics, row, mine, x, target, split);
  }
}

// A block takes 32 adjacent rows, one per lane; its warps share the classes.
template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>)
    forward_lanes(Real<T>* statistics, const T* logits, const int64_t* target,
                  const Real<T>* weight, ClassSplit split) {
  using R = Real<T>;
  __shared__ Row<R> shared[kGroups][kWarp];
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
  const int64_t strips = (split.inner + kWarp - 1) / kWarp, total = split.outer * strips;
  for (int64_t strip = blockIdx.x; strip < total; strip += gridDim.x) {
    const int64_t o = strip / strips, i = (strip - o * strips) * kWarp + lane;
    const T* x = logits + o * split.held * split.inner + i;
    Row<R> mine = Row<R>::empty();
    for (int64_t c = group; i < split.inner && c < split.held; c += kGroups) {
      const R value = Storage<T>::load(x[c * split.inner]);
      mine.raise(value);
      mine.add(value, weight == nullptr ? R(1) : weight[c], split.smooth);
    }
    // The first warp may still read the slots of the strip before, which are written next.
    __syncthreads();
    shared[group][lane] = mine;
    // Without the barrier the first warp would read the others' slots before they are written.
    __syncthreads();
    if (group != 0 || i >= split.inner) continue;
    for (int g = 1; g < kGroups; ++g) mine = Join()(mine, shared[g][lane]);
    write_row(statistics, o * split.inner + i, mine, x, target, split);
  }
}

// The numbers of one row that its gradient needs.
template <class T>
struct RowGradient {
  using R = Real<T>;
  R reference, scale, shift, pick;
  int64_t place;
  bool nothing;

  __device__ __forceinline__ RowGradient(const R* rows, const int64_t* target, int64_t row,
                                         const ClassSplit& split) {
    const int64_t count = split.outer * split.inner;
    reference = rows[row], scale = rows[count + row];
    shift = rows[2 * count + row], pick = rows[3 * count + row];
    place = target[row] - split.start;
    nothing = scale == R(0) && shift == R(0) && pick == R(0);
  }

  __device__ __forceinline__ T of(T x, int64_t c, const R* weight) const {
    if (nothing) return Storage<T>::store(R(0));
    const R w = weight == nullptr ? R(1) : weight[c];
    const R share = approximate_exponential(R(Storage<T>::load(x) - reference)) * scale - shift * w;
    return Storage<T>::store(R(c == place ? share - pick : share));
  }
};

template <class T>
__global__ void __launch_bounds__(kThreads)
    backward_rows(T* gradient, const T* logits, const int64_t* target, const Real<T>* rows,
                  const Real<T>* weight, ClassSplit split) {
  constexpr int kCount = kPackOf<T>;
  for (int64_t row = blockIdx.x; row < split.outer; row += gridDim.x) {
    const T* x = logits + row * split.held;
    T* to = gradient + row * split.held;
    const RowGradient<T> by(rows, target, row, split);
    const bool packed = aligned_alike<T>(x, to);
    const int64_t head = packed ? head_of(x, split.held) : split.held;
    const int64_t packs = (split.held - head) / kCount;
    for (int64_t c = threadIdx.x; c < head; c += kThreads) to[c] = by.of(x[c], c, weight);
    for (int64_t p = threadIdx.x; p < packs; p += kThreads) {
      const int64_t c = head + p * kCount;
      PackOf<T> pack = load_pack<PackOf<T>>(x + c);
#pragma unroll
      for (int j = 0; j < kCount; ++j) pack.value[j] = by.of(pack.value[j], c + j, weight);
      store_pack(to + c, pack);
    }
    for (int64_t c = head + packs * kCount + threadIdx.x; c < split.held; c += kThreads) {
      to[c] = by.of(x[c], c, weight);
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>)
    backward_lanes(T* gradient, const T* logits, const int64_t* target, const Real<T>* rows,
                   const Real<T>* weight, ClassSplit split) {
  const int lane = threadIdx.x % kWarp, group = threadIdx.x / kWarp;
  const int64_t strips = (split.inner + kWarp - 1) / kWarp, total = split.outer * strips;
  for (int64_t strip = blockIdx.x; strip < total; strip += gridDim.x) {
    const int64_t o = strip / strips, i = (strip - o * strips) * kWarp + lane;
    if (i >= split.inner) continue;
    const int64_t first = o * split.held * split.inner + i;
    const RowGradient<T> by(rows, target, o * split.inner + i, split);
    for (int64_t c = group; c < split.held; c += kGroups) {
      const int64_t at = first + c * split.inner;
      gradient[at] = by.of(logits[at], c, weight);
    }
  }
}

unsigned blocks_for(const ClassSplit& split) {
  const int64_t strips = split.inner == 1 ? 1 : (split.inner + kWarp - 1) / kWarp;
  return unsigned(std::min(split.outer * strips, kMostBlocks));
}

struct LaunchForward {
  void* statistics;
  const void* logits;
  const int64_t* target;
  const void* weight;
  const ClassSplit& split;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    using R = Real<T>;
    const auto rows = split.smooth ? forward_rows<T, true> : forward_rows<T, false>;
    const auto kernel = split.inner == 1 ? rows : forward_lanes<T>;
    const unsigned threads = split.inner == 1 ? kRowThreads : kThreads;
    launch({blocks_for(split), threads, 0, stream}, kernel, static_cast<R*>(statistics),
           static_cast<const T*>(logits), target, static_cast<const R*>(weight), split);
  }
};

struct LaunchBackward {
  void* gradient;
  const void* logits;
  const int64_t* target;
  const void *rows, *weight;
  const ClassSplit& split;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    using R = Real<T>;
    const auto kernel = split.inner == 1 ? backward_rows<T> : backward_lanes<T>;
    launch({blocks_for(split), kThreads, 0, stream}, kernel, static_cast<T*>(gradient),
           static_cast<const T*>(logits), target, static_cast<const R*>(rows),
           static_cast<const R*>(weight), split);
  }
};

}  // namespace

void split_cross_entropy_cuda(void* statistics, Dtype dtype, const void* logits,
                              const int64_t* target, const void* weight, const ClassSplit& split,
                              void* stream) {
  if (split.outer * split.inner == 0) return;
  visit_float_type(dtype, LaunchForward{statistics, logits, target, weight, split,
                                        static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void split_cross_entropy_backward_cuda(void* gradient, Dtype dtype, const void* logits,
                                       const int64_t* target, const void* rows, const void* weight,
                                       const ClassSplit& split, void* stream) {
  if (split.outer * split.inner == 0) return;
  visit_float_type(dtype, LaunchBackward{gradient, logits, target, rows, weight, split,
                                         static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
