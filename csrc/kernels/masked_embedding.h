// Embedding look-up in the rows of a table that one rank holds, and its gradient for those rows.
// Rows that other ranks hold read as zeros, so the ranks' results add up to the look-up in the
// whole table.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// The rows [start, start + held) of a table, each of `width` elements.
struct RowWindow {
  int64_t width, start, held;
};

// out[i] = table[index[i] - start] * scale, or zeros where that row is not held. On the CPU for i
// in [begin, end).
void masked_embedding_cpu(void* out, Dtype dtype, const void* table, const int64_t* index,
                          double scale, const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_cuda(void* out, Dtype dtype, const void* table, const int64_t* index,
                           double scale, const RowWindow& window, int64_t count, void* stream);

// The look-ups sorted by row: the k-th is row order[k] of the gradient and belongs to row row[k] of
// the window. Those with row[k] >= held come last and belong to no row.
struct SortedRows {
  const int64_t *row, *order;
  int64_t count;
};

// A row with more look-ups than kLongRun is added in kPieces pieces, so that it keeps as many warps
// of a GPU busy. Piece p of `count` look-ups begins at piece_begin(count, p).
constexpr int64_t kLongRun = 64;
constexpr int kPieces = 8;
CONSISTENT_INLINE int64_t piece_begin(int64_t count, int p) { return count * p / kPieces; }

// out[r] = scale * (sum of gradient[order[k]] with row[k] = r), divided by their number if
// `by_count`; added in order, in float32 or float64, as are the sums of pieces. Rows that were
// never looked up keep their values. On the CPU for k in [begin, end).
void masked_embedding_backward_cpu(void* out, Dtype dtype, const void* gradient,
                                   const SortedRows& sorted, double scale, bool by_count,
                                   const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_backward_cuda(void* out, Dtype dtype, const void* gradient,
                                    const SortedRows& sorted, double scale, bool by_count,
                                    const RowWindow& window, void* stream);

}  // namespace consistent
