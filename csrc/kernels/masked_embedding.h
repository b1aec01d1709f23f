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

// What a GPU reads of the look-ups: it orders them itself. Those of row `padding_row` of the window
// are left out; a number outside [0, held) leaves out none. There are fewer than 2^31 look-ups.
struct LookUps {
  const int64_t* index;
  int64_t count, padding_row;
  int32_t* memory;  // working memory of memory_words(count, held) words, with any content
};

// A row with more than kLongRun look-ups is added in kPieces pieces, so that kPieces warps of a GPU
// share it. Piece p of `count` look-ups begins at piece_begin(count, p). The CPU cuts in the same
// places, so that both give the same bits.
constexpr int64_t kLongRun = 64;
constexpr int kPieces = 8;
CONSISTENT_INLINE int64_t piece_begin(int64_t count, int p) { return count * p / kPieces; }

// Words of 4 bytes: three for each row, two for each look-up, and one for each possible long row.
constexpr int64_t memory_words(int64_t count, int64_t held) {
  return 2 + 3 * held + 2 * count + count / (kLongRun + 1);
}

// What the CPU reads of the look-ups, stably sorted by row: look-up k is row order[k] of the
// gradient and adds to row row[k] of the window. Look-ups with row[k] >= held come last and add to
// no row.
struct SortedRows {
  const int64_t *row, *order;
  int64_t count;
};

// out[r] = scale * (sum of gradient[i] over the look-ups i of row r), divided by their number if
// `by_count`; zeros if there are none. The sum is in float32 (float64 for float64), in the order of
// i, piece by piece, and the sums of the pieces are added in order. The CPU version computes the
// rows whose first look-up is in [begin, end) and clears those before them that have none, and
// those after the last if `end` is the number of look-ups.
void masked_embedding_backward_cpu(void* out, Dtype dtype, const void* gradient,
                                   const SortedRows& sorted, double scale, bool by_count,
                                   const RowWindow& window, int64_t begin, int64_t end);
void masked_embedding_backward_cuda(void* out, Dtype dtype, const void* gradient,
                                    const LookUps& look_ups, double scale, bool by_count,
                                    const RowWindow& window, void* stream);

}  // namespace consistent
