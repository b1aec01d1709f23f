// The sum of several tensors, addends of a partial tensor, with what follows it in the same pass:
//
//   total = scale * (parts[0] + parts[1] + ...) + bias + residual
//   out   = norm(activation(total))
//
// in float32, of float64 parts in float64, added in the order of the list; and of all that only the
// slice that a rank keeps.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

enum class Activation { none, relu, gelu, gelu_tanh, silu };
enum class Norm { none, layer, rms };

// The kept slice as `rows` of `columns`: row r begins, in each part, at element
// (r / group) * stride + first + (r % group) * columns. In `out` rows follow each other.
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

// What follows the sum. Null means absent. Vectors are [columns] of Real<T>, T the parts' type;
// the residual lies as `out` does, in the parts' type.
struct Epilogue {
  double scale = 1;
  const void *bias = nullptr, *residual = nullptr;
  Activation activation = Activation::none;
  Norm norm = Norm::none;
  const void *weight = nullptr, *norm_bias = nullptr;
  double eps = 0;
};

// `dtype`, of `out`, is the parts' or the one they are added in. `total` is null or takes the
// total, in that type too. CPU: rows [begin, end).
void reduce_shards_cpu(void* out, void* total, Dtype dtype, const Parts& parts,
                       const Epilogue& epilogue, const RowsOfSlice& slice, int64_t begin,
                       int64_t end);
void reduce_shards_cuda(void* out, void* total, Dtype dtype, const Parts& parts,
                        const Epilogue& epilogue, const RowsOfSlice& slice, void* stream);

}  // namespace consistent
