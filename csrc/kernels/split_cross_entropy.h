// Cross-entropy whose classes are split over the ranks: the forward computes statistics of a rank's
// logits, and the backward computes the gradient of these logits after the ranks' statistics have
// been joined. Each reads the logits once.
//
// A row's loss is (a + b W) log(sum of exp(x)) - a x[target] - b (sum of w x), where a is the
// weight of the target class, b the label smoothing per class, w the weights of the classes and W
// their sum.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// Logits have the shape [outer, held, inner] and rows the shape [outer, inner]. This rank holds the
// classes [start, start + held).
struct ClassSplit {
  int64_t outer, held, inner;
  int64_t start;
  bool smooth;
};

constexpr int kPlanes = 3, kSmoothPlanes = 5;

// statistics [planes, rows] of Real<T>:
//   0  the largest logit m, -inf if there are none
//   1  sum of exp(x - r), with r = m, or 0 where m is -inf
//   2  x[target], 0 where the target's class is not held here
// and if `smooth`:
//   3  sum of w (x - r)
//   4  sum of w
// `weight` is [held] of Real<T>, or null if every class has weight 1. The CPU versions compute rows
// [begin, end).
void split_cross_entropy_cpu(void* statistics, Dtype dtype, const void* logits,
                             const int64_t* target, const void* weight, const ClassSplit& split,
                             int64_t begin, int64_t end);
void split_cross_entropy_cuda(void* statistics, Dtype dtype, const void* logits,
                              const int64_t* target, const void* weight, const ClassSplit& split,
                              void* stream);

// gradient = exp(x - r) * scale - w * shift, minus `pick` at the target. r, scale, shift and pick
// are the four planes of `rows`, [4, rows] of Real<T>. A row whose scale, shift and pick are all
// zero (an ignored target, say) gets zeros, even if its logits have an infinity or a NaN.
void split_cross_entropy_backward_cpu(void* gradient, Dtype dtype, const void* logits,
                                      const int64_t* target, const void* rows, const void* weight,
                                      const ClassSplit& split, int64_t begin, int64_t end);
void split_cross_entropy_backward_cuda(void* gradient, Dtype dtype, const void* logits,
                                       const int64_t* target, const void* rows, const void* weight,
                                       const ClassSplit& split, void* stream);

}  // namespace consistent
