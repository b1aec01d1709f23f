// Cross-entropy where each rank holds some of the classes: what a rank can say of its logits, and
// their gradient once the ranks' sayings are joined. Each reads the logits once.
//
// A row's loss is (a + b W) log(sum of exp) - a x[target] - b (sum of w x), with a the weight of
// its target, b the smoothing of one class, w the weights of classes and W their sum.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

// Logits are [outer, held, inner], rows [outer, inner]; of all classes they are those from `start`.
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
// `weight` is [held] of Real<T>, or null where every class weighs 1. CPU: rows [begin, end).
void split_cross_entropy_cpu(void* statistics, Dtype dtype, const void* logits,
                             const int64_t* target, const void* weight, const ClassSplit& split,
                             int64_t begin, int64_t end);
void split_cross_entropy_cuda(void* statistics, Dtype dtype, const void* logits,
                              const int64_t* target, const void* weight, const ClassSplit& split,
                              void* stream);

// gradient = exp(x - r) * scale - w * shift, less `pick` at the target, with r, scale, shift and
// pick the planes of `rows`, [4, rows] of Real<T>. A row of zero scale, shift and pick gets zeros.
void split_cross_entropy_backward_cpu(void* gradient, Dtype dtype, const void* logits,
                                      const int64_t* target, const void* rows, const void* weight,
                                      const ClassSplit& split, int64_t begin, int64_t end);
void split_cross_entropy_backward_cuda(void* gradient, Dtype dtype, const void* logits,
                                       const int64_t* target, const void* rows, const void* weight,
                                       const ClassSplit& split, void* stream);

}  // namespace consistent
