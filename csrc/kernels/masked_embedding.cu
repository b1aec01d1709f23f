// Masked look-up on CUDA: one block for each row, 16 bytes for each thread. In the backward a block
// takes the run of look-ups of one row and adds them in order, so no atomics are needed and every
// run gives the same bits. No thread reads what another one writes, so nothing is synchronised.

#include <algorithm>

#include "check.h"
#include "launch.cuh"
#include "masked_embedding.h"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kMostBlocks = most_blocks(1 << 16);  // beyond it, a block takes several rows

unsigned blocks_for(int64_t rows) { return unsigned(std::min(rows, kMostBlocks)); }

template <class T>
__device__ __forceinline__ T scaled(T x, Real<T> by) {
  return Storage<T>::store(Storage<T>::load(x) * by);
}

// Copies rows as they are, in units of `Unit`.
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

template <class T>
__global__ void __launch_bounds__(kThreads)
    scale_rows(T* out, const T* table, const int64_t* index, Real<T> scale, RowWindow window,
               int64_t count) {
  for (int64_t i = blockIdx.x; i < count; i += gridDim.x) {
    const int64_t row = index[i] - window.start;
    const bool held = row >= 0 && row < window.held;
    const T* from = table + (held ? row : 0) * window.width;
    for (int64_t c = threadIdx.x; c < window.width; c += kThreads) {
      out[i * window.width + c] = held ? scaled(from[c], scale) : Storage<T>::store(Real<T>(0));
    }
  }
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    add_rows(T* out, const T* gradient, SortedRows sorted, Real<T> scale, bool by_count,
             RowWindow window) {
  using R = Real<T>;
  for (int64_t k = blockIdx.x; k < sorted.count; k += gridDim.x) {
    const int64_t row = sorted.row[k];
    if (row >= window.held) return;
    if (k > 0 && sorted.row[k - 1] == row) continue;
    int64_t stop = k + 1;
    while (stop < sorted.count && sorted.row[stop] == row) ++stop;
    const R by = by_count ? scale / R(stop - k) : scale;
    for (int64_t c = threadIdx.x; c < window.width; c += kThreads) {
      R sum = 0;
      for (int64_t j = k; j < stop; ++j) {
        sum += Storage<T>::load(gradient[sorted.order[j] * window.width + c]);
      }
      out[row * window.width + c] = Storage<T>::store(R(sum * by));
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
    launch({blocks_for(count), kThreads, 0, stream}, scale_rows<T>, static_cast<T*>(out),
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
    launch({blocks_for(sorted.count), kThreads, 0, stream}, add_rows<T>, static_cast<T*>(out),
           static_cast<const T*>(gradient), sorted, Real<T>(scale), by_count, window);
  }
};

template <class Unit>
void copy(void* out, const void* table, const int64_t* index, const RowWindow& window,
          int64_t bytes, int64_t count, cudaStream_t stream) {
  const RowWindow units{bytes / int64_t(sizeof(Unit)), window.start, window.held};
  launch({blocks_for(count), kThreads, 0, stream}, copy_rows<Unit>, static_cast<Unit*>(out),
         static_cast<const Unit*>(table), index, units, count);
}

bool aligned(const void* x) { return reinterpret_cast<uintptr_t>(x) % 16 == 0; }

}  // namespace

void masked_embedding_cuda(void* out, Dtype dtype, const void* table, const int64_t* index,
                           double scale, const RowWindow& window, int64_t count, void* stream) {
  const int64_t bytes = window.width * size_of(dtype);
  if (count == 0 || bytes == 0) return;
  const cudaStream_t on = static_cast<cudaStream_t>(stream);
  if (scale != 1) {
    visit_float_type(dtype, LaunchScale{out, table, index, scale, window, count, on});
  } else if (bytes % 16 == 0 && aligned(out) && aligned(table)) {
    copy<uint4>(out, table, index, window, bytes, count, on);
  } else {
    copy<uint8_t>(out, table, index, window, bytes, count, on);
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
