// Masked embedding look-up and its backward on CUDA.
//
//   for i in 0 .. count - 1, for c in 0 .. width - 1:  // forward
//     row = index[i] - start
//     out[i][c] = 0 <= row < held ? T(R(table[row][c]) * R(scale)) : 0  // scale 1: a copy of bytes
//   for each row with look-ups k in begin .. end - 1, for c in 0 .. width - 1:  // backward, in R
//     n = end - begin;  pieces = n > kLongRun ? kPieces : 1
//     for p in 0 .. pieces - 1:
//       s[p] = 0;  for k in piece p, in order: s[p] = s[p] + R(gradient[order[k]][c])
//     for p in 1 .. pieces - 1: s[0] = s[0] + s[p]
//     out[row][c] = T(s[0] * R(by_count ? scale / n : scale))  // the quotient in double
//
// Forward: one block per row, up to 16 bytes per thread. Backward: a run is the look-ups of one
// row, which are adjacent after the sort. A warp takes the runs that begin among its 32 look-ups;
// every lane takes 16 bytes of the width and adds the look-ups in order. So no atomics are needed,
// and every launch gives the same bits. A long run is shared by the warps of the block, each of
// which adds one piece of it.

#include <algorithm>

#include "block.cuh"
#include "check.h"
#include "launch.cuh"
#include "masked_embedding.h"
#include "units.h"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 128;
constexpr int kAddThreads = kPieces * kWarp;  // of a block in the backward: one warp per piece
// Resident blocks per multiprocessor. Three leave 80 registers per thread, which packs of eight
// need, and single elements too, whose addresses take more registers.
template <int kCount>
constexpr int kBlocksAtOnce = kCount == 8 || kCount == 1 ? 3 : 4;
constexpr int kAhead = 4;  // look-ups that are loaded before the first is added
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // grid.x; for more rows, blocks loop
constexpr int64_t kMostTiles = most_blocks(1 << 15);   // grid.y; for more columns, blocks loop

unsigned blocks_for(int64_t rows) { return unsigned(std::min(rows, kMostBlocks)); }

// The largest unit, in bytes, by which rows of `bytes` bytes can be moved between a and b.
int unit_of(int64_t bytes, const void* a, const void* b) {
  return unit_dividing(uint64_t(bytes) | reinterpret_cast<uintptr_t>(a) |
                       reinterpret_cast<uintptr_t>(b));
}

template <class T>
bool packed(const RowWindow& window, const void* a, const void* b) {
  return unit_of(window.width * int64_t(sizeof(T)), a, b) == 16;
}

template <class T>
__device__ __forceinline__ T scaled(T x, Real<T> by) {
  return Storage<T>::store(Storage<T>::load(x) * by);
}

// Copies rows without a change of bits, in units of `Unit`; the window's width counts units.
template <class Unit>
__global__ void __launch_bounds__(kThreads)
    copy_rows(Unit* out, const Unit* table, const int64_t* index, RowWindow window, int64_t count) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = index[i] - window.start;
    const bool held = row >= 0 && row < window.held;
    const Unit* from = table + (held ? row : 0) * window.width;
    for (int64_t c = threadIdx.x; c < window.width; c += kThreads) {
      out[i * window.width + c] = held ? from[c] : Unit{};
    }
  }
}

template <class T, int kCount>
__global__ void __launch_bounds__(kThreads)
    scale_rows(T* out, const T* table, const int64_t* index, Real<T> scale, RowWindow window,
               int64_t count) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = index[i] - window.start;
    const bool held = row >= 0 && row < window.held;
    const T* from = table + (held ? row : 0) * window.width;
    for (int64_t c = threadIdx.x * kCount; c < window.width; c += kThreads * kCount) {
      Pack<T, kCount> pack = {};
      if (held) {  // zeros stay zeros: an infinite scale would make NaN of them
        pack = load_pack<Pack<T, kCount>>(from + c);
#pragma unroll
        for (int j = 0; j < kCount; ++j) pack.value[j] = scaled(pack.value[j], scale);
      }
      store_pack(out + i * window.width + c, pack);
    }
  }
}

// Look-ups [begin, end) of one row; none where begin == end.
struct Run {
  int64_t row, begin, end;
  __device__ __forceinline__ int64_t count() const { return end - begin; }
};

// The run that begins at look-up k; empty if none begins there. Its end is found by steps that
// double and then halve, since most rows have one look-up and a few have thousands.
__device__ __forceinline__ Run run_at(const SortedRows& sorted, int64_t k, int64_t held) {
  if (k >= sorted.count) return Run{0, k, k};
  const int64_t row = sorted.row[k];
  if (row >= held || (k > 0 && sorted.row[k - 1] == row)) return Run{0, k, k};
  const auto same = [&](int64_t at) { return at < sorted.count && sorted.row[at] == row; };
  int64_t last = k, step = 1;
  for (; same(last + step); step *= 2) last += step;
  for (; step > 0; step /= 2) {
    if (same(last + step)) last += step;
  }
  return Run{row, k, last + 1};
}

// The columns that one lane adds up in the gradient and writes in the table.
template <class T, int kCount>
struct Columns {
  using R = Real<T>;
  T* out;
  const T* gradient;
  const SortedRows& sorted;
  int64_t width;
  double scale;
  bool by_count;
  R sums[kCount];

  __device__ __forceinline__ void clear() {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] = R(0);
  }

  // Adds look-ups [begin, end) in order and calls added(k) after each. kAhead look-ups are loaded
  // before the first is added. Beyond the end the last look-up is loaded again and not added: with
  // a condition around the load, ptxas would wait for each load before the next.
  template <class Added>
  __device__ __forceinline__ void add(int64_t begin, int64_t end, const Added& added) {
    using P = Pack<T, kCount>;
#pragma unroll 1
    for (int64_t k = begin; k < end; k += kAhead) {
      P packs[kAhead];
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        const int64_t at = k + a < end ? k + a : end - 1;
        packs[a] = load_pack<P>(gradient + sorted.order[at] * width);
      }
#pragma unroll
      for (int a = 0; a < kAhead; ++a) {
        if (k + a >= end) break;
#pragma unroll
        for (int j = 0; j < kCount; ++j) sums[j] += Storage<T>::load(packs[a].value[j]);
        added(k + a);
      }
    }
  }

  // Scales the sums of `count` look-ups, rounds them once and writes them to a row of the table.
  __device__ __forceinline__ void write(int64_t row, int64_t count) {
    const R by = R(by_count ? scale / double(count) : scale);
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] *= by;
    store_pack(out + row * width, rounded<T>(sums));
  }
};

template <class T, int kCount>
__global__ void __launch_bounds__(kAddThreads, kBlocksAtOnce<kCount>)
    add_rows(T* out, const T* gradient, SortedRows sorted, double scale, bool by_count,
             RowWindow window) {
  using R = Real<T>;
  constexpr unsigned kAll = 0xFFFFFFFFu;
  static_assert(kLongRun >= kWarp, "two long runs would begin at the look-ups of one warp");
  __shared__ Run shared[kPieces];  // the long run that begins at the look-ups of each warp
  __shared__ R pieces[kPieces][kCount][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int64_t kTile = kWarp * kCount;
  const int64_t tiles = (window.width + kTile - 1) / kTile;
  for (int64_t first = blockIdx.x * int64_t(kAddThreads); first < sorted.count;
       first += gridDim.x * int64_t(kAddThreads)) {
    // All later look-ups belong to no row either. The whole block leaves, so no barrier is missed.
    if (sorted.row[first] >= window.held) break;
    const Run own = run_at(sorted, first + threadIdx.x, window.held);
    const bool is_long = own.count() > kLongRun;
    // The short runs that begin in this warp are adjacent: a long run among them would cover at
    // least kWarp look-ups and so leave no later run to begin here.
    const unsigned starts = __ballot_sync(kAll, own.count() > 0 && !is_long);
    const int oldest = starts == 0 ? 0 : __ffs(int(starts)) - 1;
    const int newest = starts == 0 ? 0 : kWarp - 1 - __clz(int(starts));
    const int64_t begin = __shfl_sync(kAll, own.begin, oldest);
    const int64_t end = starts == 0 ? begin : __shfl_sync(kAll, own.end, newest);
    const unsigned hot = __ballot_sync(kAll, is_long);
    __syncthreads();  // other warps may still read `shared` of the iteration before
    if (is_long) shared[warp] = own;
    if (lane == 0 && hot == 0) shared[warp] = Run{0, 0, 0};
    __syncthreads();  // before the warps read `shared` of all warps below
    for (int64_t tile = blockIdx.y; tile < tiles; tile += gridDim.y) {
      const int64_t column = tile * kTile + lane * kCount;
      const bool inside = column < window.width;
      Columns<T, kCount> columns{out + column, gradient + column, sorted, window.width,
                                 scale,        by_count,          {}};
      if (inside) {
        int64_t since = begin;
        columns.add(begin, end, [&](int64_t k) {
          const int64_t row = sorted.row[k];
          if (k + 1 < end && sorted.row[k + 1] == row) return;
          columns.write(row, k + 1 - since);
          columns.clear();
          since = k + 1;
        });
      }
      for (int other = 0; other < kPieces; ++other) {
        const Run run = shared[other];
        if (run.count() == 0) continue;
        columns.clear();
        if (inside) {
          columns.add(run.begin + piece_begin(run.count(), warp),
                      run.begin + piece_begin(run.count(), warp + 1), [](int64_t) {});
        }
        __syncthreads();  // the first warp may still read `pieces` of the run before
#pragma unroll
        for (int j = 0; j < kCount; ++j) pieces[warp][j][lane] = columns.sums[j];
        __syncthreads();  // before the first warp reads the pieces of the others
        if (warp != 0 || !inside) continue;
#pragma unroll
        for (int j = 0; j < kCount; ++j) {
          for (int p = 1; p < kPieces; ++p) columns.sums[j] += pieces[p][j][lane];
        }
        columns.write(run.row, run.count());
      }
    }
  }
}

struct LaunchScale {
  void* out;
  const void* table;
  const int64_t* index;
  double scale;
  const RowWindow& window;
  int64_t count;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    packed<T>(window, out, table) ? with<T, kPackOf<T>>() : with<T, 1>();
  }
  template <class T, int kCount>
  void with() const {
    launch({blocks_for(count), kThreads, 0, stream}, scale_rows<T, kCount>, static_cast<T*>(out),
           static_cast<const T*>(table), index, Real<T>(scale), window, count);
  }
};

struct LaunchAdd {
  void* out;
  const void* gradient;
  const SortedRows& sorted;
  double scale;
  bool by_count;
  const RowWindow& window;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    packed<T>(window, out, gradient) ? with<T, kPackOf<T>>() : with<T, 1>();
  }
  template <class T, int kCount>
  void with() const {
    const int64_t tile = kWarp * kCount, tiles = (window.width + tile - 1) / tile;
    const dim3 blocks(blocks_for((sorted.count + kAddThreads - 1) / kAddThreads),
                      unsigned(std::min(tiles, kMostTiles)));
    launch({blocks, kAddThreads, 0, stream}, add_rows<T, kCount>, static_cast<T*>(out),
           static_cast<const T*>(gradient), sorted, scale, by_count, window);
  }
};

template <class Unit>
void copy(void* out, const void* table, const int64_t* index, const RowWindow& window,
          int64_t bytes, int64_t count, cudaStream_t stream) {
  const RowWindow units{bytes / int64_t(sizeof(Unit)), window.start, window.held};
  launch({blocks_for(count), kThreads, 0, stream}, copy_rows<Unit>, static_cast<Unit*>(out),
         static_cast<const Unit*>(table), index, units, count);
}

}  // namespace

void masked_embedding_cuda(void* out, Dtype dtype, const void* table, const int64_t* index,
                           double scale, const RowWindow& window, int64_t count, void* stream) {
  const int64_t bytes = window.width * size_of(dtype);
  if (count == 0 || bytes == 0) return;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (scale != 1) {
    visit_float_type(dtype, LaunchScale{out, table, index, scale, window, count, on});
  } else {
    visit_unit(unit_of(bytes, out, table), [&](auto unit) {
      using Unit = typename UnitOf<decltype(unit)::value>::type;
      copy<Unit>(out, table, index, window, bytes, count, on);
    });
  }
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void masked_embedding_backward_cuda(void* out, Dtype dtype, const void* gradient,
                                    const SortedRows& sorted, double scale, bool by_count,
                                    const RowWindow& window, void* stream) {
  if (sorted.count == 0 || window.width == 0 || window.held == 0) return;
  visit_float_type(dtype, LaunchAdd{out, gradient, sorted, scale, by_count, window,
                                    static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
