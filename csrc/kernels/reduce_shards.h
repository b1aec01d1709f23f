// The sum of several tensors, the addends of a partial tensor, and the ops that follow it, in one
// pass:
//
//   total = scale * (parts[0] + parts[1] + ...) + bias + residual
//   out   = norm(activation(total))
//
// It is computed in float32 (float64 for float64 parts), adds in the order of the list, and makes
// only the slice that a rank keeps.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

enum class Activation { none, relu, gelu, gelu_tanh, silu };
enum class Norm { none, layer, rms };

// The kept slice as `rows` of `columns`: row r begins, in each part, at element
// (r / group) * stride + first + (r % group) * columns. In `out` the rows are contiguous.
struct RowsOfSlice {
  int64_t rows, columns;
  int64_t group, stride, first;

  CONSISTENT_INLINE int64_t start(int64_t r) const {
    return (r / group) * stride + first + (r % group) * columns;
  }
};

struct Parts {
  static constexpr int kMost = 64;
  const void* data[kMost];
  int count;
  Dtype dtype;
};

// What follows the sum. A null pointer leaves that step out. Vectors are [columns] of Real<T>,
// where T is the parts' type, or, on CUDA, of T if they are `narrow`; the residual has the layout
// of `out` and the parts' type.
struct Epilogue {
  double scale = 1;
  bool narrow = false;
  const void *bias = nullptr, *residual = nullptr;
  Activation activation = Activation::none;
  Norm norm = Norm::none;
  const void *weight = nullptr, *norm_bias = nullptr;
  double eps = 0;
};

// `dtype`, that of `out`, is the parts' dtype or the one they are added in. `total` is null, or
// receives the total in the same dtype. On the CPU for rows [begin, end).
void reduce_shards_cpu(void* out, void* total, Dtype dtype, const Parts& parts,
                       const Epilogue& epilogue, const RowsOfSlice& slice, int64_t begin,
                       int64_t end);
void reduce_shards_cuda(void* out, void* total, Dtype dtype, const Parts& parts,
                        const Epilogue& epilogue, const RowsOfSlice& slice, void* stream);

}  // namespace consistent
