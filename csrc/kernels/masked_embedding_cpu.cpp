// Masked embedding look-up on the CPU. Forward copies or clears rows; backward adds up the
// gradients row by row, in the same order and pieces as CUDA.

#include <algorithm>
#include <cstring>

#include "clones.h"
#include "masked_embedding.h"

namespace consistent {
namespace {

constexpr int64_t kColumns = 512;  // columns added up at once: their sums stay in the L1 cache

struct Scale {
  void* out;
  const void* from;
  double scale;
  int64_t width;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    const T* __restrict__ x = static_cast<const T*>(from);
    T* __restrict__ to = static_cast<T*>(out);
    const Real<T> by = Real<T>(scale);
    for (int64_t i = 0; i < width; ++i) to[i] = Storage<T>::store(Storage<T>::load(x[i]) * by);
  }
};

CONSISTENT_CLONES void scale_row(Dtype dtype, const Scale& row) { visit_float_type(dtype, row); }

// Adds up one run (the look-ups of one row) for `columns` of its columns.
struct AddRows {
  void* out;
  const void* gradient;
  const int64_t* order;
  int64_t rows, width, columns;
  double scale;

  template <class T>
  CONSISTENT_INLINE void add(Real<T>* __restrict__ sums, int64_t begin, int64_t end) const {
    for (int64_t k = begin; k < end; ++k) {
      const T* __restrict__ x = static_cast<const T*>(gradient) + order[k] * width;
      for (int64_t c = 0; c < columns; ++c) sums[c] += Storage<T>::load(x[c]);
    }
  }

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    using R = Real<T>;
    R sums[kColumns] = {};
    if (rows <= kLongRun) {
      add<T>(sums, 0, rows);
    } else {
      add<T>(sums, 0, piece_begin(rows, 1));
      for (int p = 1; p < kPieces; ++p) {
        R piece[kColumns] = {};
        add<T>(piece, piece_begin(rows, p), piece_begin(rows, p + 1));
        for (int64_t c = 0; c < columns; ++c) sums[c] += piece[c];
      }
    }
    T* __restrict__ to = static_cast<T*>(out);
    const R by = R(scale);
    for (int64_t c = 0; c < columns; ++c) to[c] = Storage<T>::store(R(sums[c] * by));
  }
};

CONSISTENT_CLONES void add_rows(Dtype dtype, const AddRows& rows) { visit_float_type(dtype, rows); }

}  // namespace

void masked_embedding_cpu(void* out, Dtype dtype, const void* table, const int64_t* index,
                          double scale, const RowWindow& window, int64_t begin, int64_t end) {
  const int64_t bytes = window.width * size_of(dtype);
  if (bytes == 0) return;
  for (int64_t i = begin; i < end; ++i) {
    char* to = static_cast<char*>(out) + i * bytes;
    const int64_t row = index[i] - window.start;
    if (row < 0 || row >= window.held) {
      std::memset(to, 0, size_t(bytes));
      continue;
    }
    const char* from = static_cast<const char*>(table) + row * bytes;
    if (scale == 1) {
      std::memcpy(to, from, size_t(bytes));
    } else {
      scale_row(dtype, Scale{to, from, scale, window.width});
    }
  }
}

void masked_embedding_backward_cpu(void* out, Dtype dtype, const void* gradient,
                                   const SortedRows& sorted, double scale, bool by_count,
                                   const RowWindow& window, int64_t begin, int64_t end) {
  const int64_t size = size_of(dtype), bytes = window.width * size;
  if (bytes == 0) return;
  // Clears the rows between that of look-up k - 1 and `row`.
  const auto clear_before = [&](int64_t k, int64_t row) {
    const int64_t first = k == 0 ? 0 : sorted.row[k - 1] + 1;
    if (first >= row) return;
    std::memset(static_cast<char*>(out) + first * bytes, 0, size_t((row - first) * bytes));
  };
  for (int64_t k = begin; k < end;) {
    const int64_t row = sorted.row[k];
    const bool begins_here = k == 0 || sorted.row[k - 1] != row;
    if (begins_here) clear_before(k, std::min(row, window.held));
    if (row >= window.held) return;
    int64_t stop = k + 1;
    // Up to sorted.count, not `end`: the thread that has the first look-up of a run adds the whole
    // run, and a thread whose share begins inside a run skips the rest of that run.
    while (stop < sorted.count && sorted.row[stop] == row) ++stop;
    const double by = by_count ? scale / double(stop - k) : scale;
    for (int64_t c = 0; begins_here && c < window.width; c += kColumns) {
      const int64_t columns = std::min(kColumns, window.width - c);
      add_rows(dtype, AddRows{static_cast<char*>(out) + (row * window.width + c) * size,
                              static_cast<const char*>(gradient) + c * size, sorted.order + k,
                              stop - k, window.width, columns, by});
    }
    k = stop;
  }
  if (end == sorted.count) clear_before(end, window.held);
}

}  // namespace consistent
