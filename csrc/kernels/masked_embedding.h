// Embedding look-up in the rows of a table that this rank holds, and the gradient for those rows. A
// look-up of a row that another rank holds gives zeros, so the sum of the ranks' results is the
// look-up in the whole table.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// The rows [start, start + held) of a table, each of `width` elements.
struct RowWindow {
  int64_t width, start, held;
};

// out[i] = table[index[i] - start] * scale, or zeros where this rank does not hold that row. The
// CPU version computes i in [begin, end). With scale 1, bytes are copied, whatever the dtype.
void masked_embedding_cpu(void* out, Dtype dtype, const void* table, const int64_t* index,
                          double scale, const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_cuda(void* out, Dtype dtype, const void* table, const int64_t* index,
                           double scale, const RowWindow& window, int64_t count, void* stream);

// The look-ups, stably sorted by row: look-up k is row order[k] of the gradient and adds to row
// row[k] of the window. Look-ups with row[k] >= held come last and add to no row.
struct SortedRows {
  const int64_t *row, *order;
  int64_t count;
};

// A row with more than kLongRun look-ups is added in kPieces pieces, so that kPieces warps of a GPU
// share it. Piece p of `count` look-ups begins at piece_begin(count, p). The CPU cuts in the same
// places, so that both give the same bits.
constexpr int64_t kLongRun = 64;
constexpr int kPieces = 8;
CONSISTENT_INLINE int64_t piece_begin(int64_t count, int p) { return count * p / kPieces; }

// out[r] = scale * (sum of gradient[order[k]] over the k with row[k] = r), divided by the number of
// these k if `by_count`. The sum is in float32 (float64 for float64), in the order of k, piece by
// piece, and the sums of the pieces are added in order. Rows that were never looked up keep their
// values in `out`. The CPU version computes the rows whose first look-up is in [begin, end).
void masked_embedding_backward_cpu(void* out, Dtype dtype, const void* gradient,
                                   const SortedRows& sorted, double scale, bool by_count,
                                   const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_backward_cuda(void* out, Dtype dtype, const void* gradient,
                                    const SortedRows& sorted, double scale, bool by_count,
                                    const RowWindow& window, void* stream);

}  // namespace consistent
