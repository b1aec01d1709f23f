// Look-up in the rows of a table that one rank holds: rows that lie elsewhere read as zeros, so
// that the ranks' results add up to the look-up in the whole. And its gradient, for the rows held
// here.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// Of a table's rows of `width` elements, those from `start` to `start + held`.
struct RowWindow {
  int64_t width, start, held;
};

// out[i] = table[index[i] - start] * scale, zeros where that is not held. CPU: i of [begin, end).
void masked_embedding_cpu(void* out, Dtype dtype, const void* table, const int64_t* index,
                          double scale, const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_cuda(void* out, Dtype dtype, const void* table, const int64_t* index,
                           double scale, const RowWindow& window, int64_t count, void* stream);

// The look-ups in order of their row: the k-th is gradient row order[k] and belongs to row row[k]
// of the window; from the first row[k] >= held on, to none.
struct SortedRows {
  const int64_t *row, *order;
  int64_t count;
};

// out[r] = scale * (sum of gradient[order[k]] with row[k] = r), divided by their number if
// `by_count`; added in order, in float32 or float64. Rows never looked up are left alone. CPU:
// k of [begin, end).
void masked_embedding_backward_cpu(void* out, Dtype dtype, const void* gradient,
                                   const SortedRows& sorted, double scale, bool by_count,
                                   const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_backward_cuda(void* out, Dtype dtype, const void* gradient,
                                    const SortedRows& sorted, double scale, bool by_count,
                                    const RowWindow& window, void* stream);

}  // namespace consistent
