// Adds several tensors (the addends of a partial tensor) and applies the ops that follow the sum,
// in one pass over memory:
//
//   total = scale * (parts[0] + parts[1] + ...) + bias + residual
//   out   = norm(activation(total))
//
// All arithmetic is in float32 (float64 for float64 parts), the parts are added in the order of the
// list, and only the slice that this rank keeps is computed.

#pragma once

#include <cstdint>

#include "storage.h"

namespace consistent {

enum class Activation { none, relu, gelu, gelu_tanh, silu };
enum class Norm { none, layer, rms };

// The kept slice as `rows` rows of `columns` elements. In each part, row r begins at element
// (r / group) * stride + first + (r % group) * columns. In `out` the rows are contiguous.
struct RowsOfSlice {
  int64_t rows, columns;
  int64_t group, stride, first;

  // `group` is a divisor, so it is at least 1 for an empty slice too. The first group, which is all
  // of a slice of whole rows, needs no division, which is slow in 64 bits.
  CONSISTENT_INLINE int64_t start(int64_t r) const {
    if (r < group) return first + r * columns;
    return (r / group) * stride + first + (r % group) * columns;
  }
};

// Passed to kernels by value, so the pointers lie in the kernel's parameter memory.
struct Parts {
  static constexpr int kMost = 64;
  const void* data[kMost];
  int count;
  Dtype dtype;
};

// The ops that follow the sum. A null pointer leaves its step out. With T the parts' type, the
// vectors (bias, weight, norm_bias) have `columns` elements of Real<T>; on CUDA, of T if `narrow`
// is set. The residual has the layout of `out` and elements of T.
struct Epilogue {
  double scale = 1;
  bool narrow = false;
  const void *bias = nullptr, *residual = nullptr;
  Activation activation = Activation::none;
  Norm norm = Norm::none;
  const void *weight = nullptr, *norm_bias = nullptr;
  double eps = 0;
};

// `dtype` is that of `out`: the parts' dtype, or the dtype in which they are added. `total` is null
// or receives `total` of the formula above, in the same dtype. The CPU version computes rows
// [begin, end); the CUDA version computes all rows.
void reduce_shards_cpu(void* out, void* total, Dtype dtype, const Parts& parts,
                       const Epilogue& epilogue, const RowsOfSlice& slice, int64_t begin,
                       int64_t end);
void reduce_shards_cuda(void* out, void* total, Dtype dtype, const Parts& parts,
                        const Epilogue& epilogue, const RowsOfSlice& slice, void* stream);

}  // namespace consistent
