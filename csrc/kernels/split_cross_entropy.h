// Cross-entropy where each rank holds some of the classes: the statistics of a rank's logits, and
// the gradient of these logits once the ranks' statistics are joined. Each reads the logits once.
//
// A row's loss is (a + b W) log(sum of exp) - a x[target] - b (sum of w x), where a is the weight
// of its target, b the smoothing of one class, w are the weights of the classes and W is their sum.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// Logits are [outer, held, inner], rows are [outer, inner]; the classes are [start, start + held).
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
// `weight` is [held] of Real<T>, or null if every class weighs 1. On the CPU for rows
// [begin, end).
void split_cross_entropy_cpu(void* statistics, Dtype dtype, const void* logits,
                             const int64_t* target, const void* weight, const ClassSplit& split,
                             int64_t begin, int64_t end);
void split_cross_entropy_cuda(void* statistics, Dtype dtype, const void* logits,
                              const int64_t* target, const void* weight, const ClassSplit& split,
                              void* stream);

// gradient = exp(x - r) * scale - w * shift, minus `pick` at the target, where r, scale, shift and
// pick are the planes of `rows`, [4, rows] of Real<T>. A row whose scale, shift and pick are zero
// gets zeros.
void split_cross_entropy_backward_cpu(void* gradient, Dtype dtype, const void* logits,
                                      const int64_t* target, const void* rows, const void* weight,
                                      const ClassSplit& split, int64_t begin, int64_t end);
void split_cross_entropy_backward_cuda(void* gradient, Dtype dtype, const void* logits,
                                       const int64_t* target, const void* rows, const void* weight,
                                       const ClassSplit& split, void* stream);

}  // namespace consistent
