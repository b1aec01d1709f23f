// Masked embedding look-up and its backward on CUDA.
//
//   for i in 0 .. count - 1, for c in 0 .. width - 1:  // forward
//     row = index[i] - start
//     out[i][c] = 0 <= row < held ? T(R(table[row][c]) * R(scale)) : 0  // scale 1: a copy of bytes
//   for row in 0 .. held - 1, for c in 0 .. width - 1:  // backward, in R
//     order = the look-ups i with index[i] - start = row != padding_row, ascending
//     n = length of order;  pieces = n > kLongRun ? kPieces : 1
//     for p in 0 .. pieces - 1:
//       s[p] = 0;  for k in piece p, in order: s[p] = s[p] + R(gradient[order[k]][c])
//     for p in 1 .. pieces - 1: s[0] = s[0] + s[p]
//     out[row][c] = n > 0 ? T(s[0] * R(by_count ? scale / n : scale)) : 0  // quotient in double
//
// Forward: one block per row, up to 16 bytes per thread.
//
// Backward: link_rows counts the look-ups of each row and links them in a list. The order of the
// list differs from launch to launch, so whoever adds a row first puts its look-ups in order; then
// every launch gives the same bits. add_rows writes every row once: zeros, or the sum of its list.
// Most rows have no look-up or a few, for which a list takes one launch where a sort takes several.
// A list of thousands cannot be followed by many threads at once. So add_rows leaves long rows to
// three more launches, which end at once if there are none: place_long puts the look-ups of each
// long row next to each other (a counting sort), sort_long orders them, and add_long adds them, one
// piece in each warp of a block.

#include <algorithm>

#include "block.cuh"
#include "check.h"
#include "launch.cuh"
#include "masked_embedding.h"
#include "units.h"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 128;                 // of a block in the forward
constexpr int kAddThreads = kPieces * kWarp;  // of a block in the backward
constexpr int kRowThreads = 64;               // that add a row of at most kLongRun look-ups
constexpr int kRows = kAddThreads / kRowThreads;
constexpr int kPacks = 4;  // that such a thread loads before it adds the first
constexpr int kAhead = 4;  // look-ups of a long row that a thread loads before it adds the first
// Resident blocks per multiprocessor in the backward: four leave 64 registers per thread, three 80,
// which packs of eight need on some GPUs.
constexpr int kLongAtOnce = 4;
#if defined(__CUDA_ARCH__) && (__CUDA_ARCH__ < 800 || __CUDA_ARCH__ >= 1000)
template <int kCount>
constexpr int kRowsAtOnce = kCount == 8 ? 3 : 4;
#else
template <int kCount>
constexpr int kRowsAtOnce = 4;
#endif
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // grid.x; for more rows, blocks loop
constexpr int64_t kMostTiles = most_blocks(1 << 15);   // grid.y; for more columns, blocks loop
// Blocks of the launches for long rows. Mostly there are none, so a launch must end quickly.
constexpr int64_t kLongBlocks = most_blocks(1 << 10);
// Words of bits for each thread of sort_long. Few in tests, so that the look-ups do not fit.
constexpr int kWords = int(most_blocks(8));
constexpr unsigned kAll = 0xFFFFFFFFu;

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

// The working memory of the backward (memory_words). Memory of two names has the first use up to
// add_rows, and the second one after that.
struct Lists {
  int *long_rows, *long_look_ups;  // how many long rows there are, and look-ups of these
  int* count;                      // row -> its look-ups
  int* head;                       // row -> the first of its list; not set if the count is 0
  int* begin;                      // long row -> the first place of its look-ups in `placed`
  int *next, *placed;              // look-up -> the next of the list; the look-ups of the long rows
  int *among, *sorted;  // look-up -> its number among those of the row; `placed`, in order
  int* longs;           // a look-up of each long row

  Lists(int32_t* memory, int64_t look_ups, int64_t held)
      : long_rows(memory),
        long_look_ups(memory + 1),
        count(memory + 2),
        head(count + held),
        begin(head + held),
        next(begin + held),
        placed(next),
        among(next + look_ups),
        sorted(among),
        longs(among + look_ups) {}

  // What must be 0 at first: the two totals and the counts.
  static size_t cleared_bytes(int64_t held) { return size_t(2 + held) * sizeof(int); }
};

// The row to which look-up i adds; -1 if it adds to none.
__device__ __forceinline__ int64_t row_of(const LookUps& look_ups, const RowWindow& window,
                                          int64_t i) {
  const int64_t row = look_ups.index[i] - window.start;
  return row >= 0 && row < window.held && row != look_ups.padding_row ? row : -1;
}

// Counts the look-ups of each row, and puts each of them at the head of its row's list.
__global__ void __launch_bounds__(kAddThreads)
    link_rows(Lists lists, LookUps look_ups, RowWindow window) {
  for (int64_t i = blockIdx.x * int64_t(kAddThreads) + threadIdx.x; i < look_ups.count;
       i += gridDim.x * int64_t(kAddThreads)) {
    const int64_t row = row_of(look_ups, window, i);
    if (row < 0) continue;
    lists.among[i] = atomicAdd(&lists.count[row], 1);
    lists.next[i] = atomicExch(&lists.head[row], int(i));
  }
}

// Follows a list of n look-ups and puts them into `ordered`, ascending: the place of each is the
// number of smaller ones. A whole warp calls it, with one list.
__device__ __forceinline__ void order_list(int* ordered, int* found, const int* next, int at,
                                           int n) {
  const int lane = threadIdx.x % kWarp;
  __syncwarp();  // other lanes may still read the list before
#pragma unroll 1
  for (int k = 0; k < n; ++k) {
    if (k % kWarp == lane) found[k] = at;
    at = next[at];
  }
  __syncwarp();  // before lanes read what others have found
#pragma unroll 1
  for (int k = lane; k < n; k += kWarp) {
    const int own = found[k];
    int smaller = 0;
#pragma unroll 1
    for (int j = 0; j < n; ++j) smaller += found[j] < own;
    ordered[smaller] = own;
  }
  __syncwarp();  // before lanes read what others have ordered
}

// Scales the sums of n look-ups, rounds them once and writes them.
template <class T, int kCount>
__device__ __forceinline__ void write_sums(T* to, Real<T> (&sums)[kCount], Real<T> by) {
#pragma unroll
  for (int j = 0; j < kCount; ++j) sums[j] *= by;
  store_pack(to, rounded<T>(sums));
}

template <class R>
__device__ __forceinline__ R factor_of(double scale, bool by_count, int n) {
  return R(by_count ? scale / double(n) : scale);
}

// Writes all rows but the long ones, which it lists, and gives each of these its part of `placed`.
template <class T, int kCount>
__global__ void __launch_bounds__(kAddThreads, kRowsAtOnce<kCount>)
    add_rows(T* out, const T* gradient, Lists lists, double scale, bool by_count,
             RowWindow window) {
  using R = Real<T>;
  using P = Pack<T, kCount>;
  constexpr int64_t kStep = kRowThreads * kCount;  // columns between two packs of a thread
  static_assert(kRowThreads % kWarp == 0, "a warp would have several lists");
  __shared__ int found[kAddThreads / kWarp][kLongRun], ordered[kAddThreads / kWarp][kLongRun];
  const int own = threadIdx.x % kRowThreads, warp = threadIdx.x / kWarp;
  for (int64_t row = blockIdx.x * int64_t(kRows) + threadIdx.x / kRowThreads; row < window.held;
       row += gridDim.x * int64_t(kRows)) {
    const int n = lists.count[row], head = lists.head[row];
    T* const to = out + row * window.width;
    if (n > kLongRun) {
      if (own != 0) continue;
      lists.longs[atomicAdd(lists.long_rows, 1)] = head;
      lists.begin[row] = atomicAdd(lists.long_look_ups, n);
      continue;
    }
    if (n == 0) {  // not a sum of nothing: an infinite scale would make NaN of it
#pragma unroll 4
      for (int64_t c = own * kCount; c < window.width; c += kStep) store_pack(to + c, P{});
      continue;
    }
    if (n > 1) order_list(ordered[warp], found[warp], lists.next, head, n);
    for (int64_t first = own * kCount; first < window.width; first += kPacks * kStep) {
      const T* const columns = gradient + first;
      R sums[kPacks][kCount] = {};
#pragma unroll 1
      for (int k = 0; k < n; ++k) {
        const int64_t look_up = n == 1 ? head : ordered[warp][k];
        const T* const from = columns + look_up * window.width;
        P packs[kPacks];
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (first + i * kStep < window.width) packs[i] = load_pack<P>(from + i * kStep);
        }
#pragma unroll
        for (int i = 0; i < kPacks; ++i) {
          if (first + i * kStep >= window.width) continue;
#pragma unroll
          for (int j = 0; j < kCount; ++j) sums[i][j] += Storage<T>::load(packs[i].value[j]);
        }
      }
      const R by = factor_of<R>(scale, by_count, n);
#pragma unroll
      for (int i = 0; i < kPacks; ++i) {
        if (first + i * kStep < window.width) write_sums(to + first + i * kStep, sums[i], by);
      }
    }
  }
}

// Puts the look-ups of each long row next to each other.
__global__ void __launch_bounds__(kAddThreads)
    place_long(Lists lists, LookUps look_ups, RowWindow window) {
  if (*lists.long_rows == 0) return;
  for (int64_t i = blockIdx.x * int64_t(kAddThreads) + threadIdx.x; i < look_ups.count;
       i += gridDim.x * int64_t(kAddThreads)) {
    const int64_t row = row_of(look_ups, window, i);
    if (row < 0 || lists.count[row] <= kLongRun) continue;
    lists.placed[lists.begin[row] + lists.among[i]] = int(i);
  }
}

// Sorts the look-ups of each long row: a block sets a bit for each and writes down where the bits
// are, ascending. If there are more look-ups than bits, it takes one window of them after another.
__global__ void __launch_bounds__(kAddThreads)
    sort_long(Lists lists, LookUps look_ups, RowWindow window) {
  constexpr int kBits = 32, kThreadBits = kWords * kBits, kWindow = kAddThreads * kThreadBits;
  __shared__ unsigned bits[kAddThreads][kWords];
  __shared__ int found[kAddThreads / kWarp];  // by each warp
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  for (int64_t l = blockIdx.x; l < *lists.long_rows; l += gridDim.x) {
    const int64_t row = look_ups.index[lists.longs[l]] - window.start;
    const int n = lists.count[row];
    const int* const placed = lists.placed + lists.begin[row];
    int* sorted = lists.sorted + lists.begin[row];
    for (int64_t start = 0; start < look_ups.count; start += kWindow) {
#pragma unroll
      for (int w = 0; w < kWords; ++w) bits[threadIdx.x][w] = 0;
      __syncthreads();  // before other threads set bits in these words
#pragma unroll 4
      for (int k = threadIdx.x; k < n; k += kAddThreads) {
        const int64_t at = placed[k] - start;
        if (at < 0 || at >= kWindow) continue;
        atomicOr(&bits[at / kThreadBits][at / kBits % kWords], 1u << at % kBits);
      }
      __syncthreads();  // before the bits are read
      int own = 0;
#pragma unroll
      for (int w = 0; w < kWords; ++w) own += __popc(bits[threadIdx.x][w]);
      int up_to = own;  // and with this thread's own, those of the lanes before
      for (int step = 1; step < kWarp; step *= 2) {
        const int before = __shfl_up_sync(kAll, up_to, unsigned(step));
        if (lane >= step) up_to += before;
      }
      if (lane == kWarp - 1) found[warp] = up_to;
      __syncthreads();  // before a warp reads what others have found
      int* to = sorted + up_to - own;
      for (int w = 0; w < kAddThreads / kWarp; ++w) {
        if (w < warp) to += found[w];
        sorted += found[w];
      }
      for (int w = 0; w < kWords; ++w) {
        for (unsigned left = bits[threadIdx.x][w]; left != 0; left &= left - 1) {
          *to++ = int(start) + (int(threadIdx.x) * kWords + w) * kBits + __ffs(int(left)) - 1;
        }
      }
    }
  }
}

// Adds the first kAtOnce look-ups of `order` to the sums, in order, after all of them are loaded.
template <int kAtOnce, class T, int kCount>
__device__ __forceinline__ void add_look_ups(Real<T> (&sums)[kCount], const T* gradient,
                                             int64_t width, const int* order) {
  using P = Pack<T, kCount>;
  P packs[kAtOnce];
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) packs[a] = load_pack<P>(gradient + order[a] * width);
#pragma unroll
  for (int a = 0; a < kAtOnce; ++a) {
#pragma unroll
    for (int j = 0; j < kCount; ++j) sums[j] += Storage<T>::load(packs[a].value[j]);
  }
}

// Writes the long rows: a block adds a tile of columns, each warp one piece of the look-ups.
template <class T, int kCount>
__global__ void __launch_bounds__(kAddThreads, kLongAtOnce)
    add_long(T* out, const T* gradient, Lists lists, LookUps look_ups, double scale, bool by_count,
             RowWindow window) {
  using R = Real<T>;
  __shared__ R pieces[kPieces][kCount][kWarp];
  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  constexpr int64_t kTile = kWarp * kCount;
  for (int64_t l = blockIdx.x; l < *lists.long_rows; l += gridDim.x) {
    const int64_t row = look_ups.index[lists.longs[l]] - window.start;
    const int n = lists.count[row];
    const int* const order = lists.sorted + lists.begin[row];
    for (int64_t first = blockIdx.y * kTile; first < window.width; first += gridDim.y * kTile) {
      const int64_t column = first + lane * kCount;
      const bool inside = column < window.width;
      R sums[kCount] = {};
      int64_t k = piece_begin(n, warp);
      const int64_t end = inside ? piece_begin(n, warp + 1) : k;
      const T* const from = gradient + column;
#pragma unroll 1
      for (; k + kAhead <= end; k += kAhead) {
        add_look_ups<kAhead>(sums, from, window.width, order + k);
      }
#pragma unroll 1
      for (; k < end; ++k) add_look_ups<1>(sums, from, window.width, order + k);
      __syncthreads();  // the first warp may still read `pieces` of the tile before
#pragma unroll
      for (int j = 0; j < kCount; ++j) pieces[warp][j][lane] = sums[j];
      __syncthreads();  // before the first warp reads the pieces of the others
      if (warp != 0 || !inside) continue;
#pragma unroll
      for (int j = 0; j < kCount; ++j) {
        for (int p = 1; p < kPieces; ++p) sums[j] += pieces[p][j][lane];
      }
      write_sums(out + row * window.width + column, sums, factor_of<R>(scale, by_count, n));
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

// Blocks for the long rows, at most as many as there can be such rows.
int64_t most_long(int64_t look_ups) { return std::min(look_ups / (kLongRun + 1), kLongBlocks); }

struct LaunchAdd {
  void* out;
  const void* gradient;
  const LookUps& look_ups;
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
    T* const to = static_cast<T*>(out);
    const T* const from = static_cast<const T*>(gradient);
    const int64_t count = look_ups.count, held = window.held;
    const Lists lists(look_ups.memory, count, held);
    const unsigned each = blocks_for((count + kAddThreads - 1) / kAddThreads);
    CONSISTENT_CHECK_CUDA(cudaMemsetAsync(look_ups.memory, 0, Lists::cleared_bytes(held), stream));
    if (count > 0) launch({each, kAddThreads, 0, stream}, link_rows, lists, look_ups, window);
    launch({blocks_for((held + kRows - 1) / kRows), kAddThreads, 0, stream}, add_rows<T, kCount>,
           to, from, lists, scale, by_count, window);
    const int64_t rows = most_long(count);
    if (rows == 0) return;
    launch({unsigned(std::min<int64_t>(each, kLongBlocks)), kAddThreads, 0, stream}, place_long,
           lists, look_ups, window);
    launch({unsigned(rows), kAddThreads, 0, stream}, sort_long, lists, look_ups, window);
    const int64_t tile = kWarp * kCount;
    const int64_t tiles = std::min((window.width + tile - 1) / tile, kMostTiles);
    const dim3 blocks(unsigned(std::min(rows, std::max<int64_t>(1, kLongBlocks / tiles))),
                      unsigned(tiles));
    launch({blocks, kAddThreads, 0, stream}, add_long<T, kCount>, to, from, lists, look_ups, scale,
           by_count, window);
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
                                    const LookUps& look_ups, double scale, bool by_count,
                                    const RowWindow& window, void* stream) {
  if (window.width == 0 || window.held == 0) return;
  visit_float_type(dtype, LaunchAdd{out, gradient, look_ups, scale, by_count, window,
                                    static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
