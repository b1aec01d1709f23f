// The fused sum of reduce_shards.h on the CPU. It works on kStretch elements of a row at a time, so
// that they stay in the L1 cache while the parts are added and the ops that follow are applied. If
// there is a norm, the whole row is kept.

#include <algorithm>
#include <vector>

#include "activation.h"
#include "clones.h"
#include "lanes.h"
#include "reduce_shards.h"

namespace consistent {
namespace {

constexpr int64_t kStretch = 1024;

struct AddParts {
  void* sums;
  const Parts& parts;
  int64_t at, n;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    Real<T>* __restrict__ to = static_cast<Real<T>*>(sums);
    const T* __restrict__ first = static_cast<const T*>(parts.data[0]) + at;
    int p = 1;
    if (parts.count > 1) {
      const T* __restrict__ second = static_cast<const T*>(parts.data[p++]) + at;
      for (int64_t i = 0; i < n; ++i) {
        to[i] = Storage<T>::load(first[i]) + Storage<T>::load(second[i]);
      }
    } else {
      for (int64_t i = 0; i < n; ++i) to[i] = Storage<T>::load(first[i]);
    }
    for (; p < parts.count; ++p) {
      const T* __restrict__ next = static_cast<const T*>(parts.data[p]) + at;
      for (int64_t i = 0; i < n; ++i) to[i] += Storage<T>::load(next[i]);
    }
  }
};

CONSISTENT_CLONES void add_parts(void* sums, const Parts& parts, int64_t at, int64_t n) {
  visit_float_type(parts.dtype, AddParts{sums, parts, at, n});
}

// Applies scale, bias and residual, in this order. `at` is an index in `out`, `column` in the row.
struct Shift {
  void* sums;
  const Epilogue& epilogue;
  int64_t at, column, n;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    using R = Real<T>;
    R* __restrict__ to = static_cast<R*>(sums);
    if (epilogue.scale != 1) {
      const R by = R(epilogue.scale);
      for (int64_t i = 0; i < n; ++i) to[i] *= by;
    }
    if (epilogue.bias != nullptr) {
      const R* __restrict__ bias = static_cast<const R*>(epilogue.bias) + column;
      for (int64_t i = 0; i < n; ++i) to[i] += bias[i];
    }
    if (epilogue.residual != nullptr) {
      const T* __restrict__ more = static_cast<const T*>(epilogue.residual) + at;
      for (int64_t i = 0; i < n; ++i) to[i] += Storage<T>::load(more[i]);
    }
  }
};

CONSISTENT_CLONES void shift(Dtype dtype, const Shift& stretch) {
  visit_float_type(dtype, stretch);
}

template <class R>
struct Activate {
  R* sums;
  int64_t n;
  template <class Kind>
  CONSISTENT_INLINE void operator()(Kind) const {
    R* __restrict__ x = sums;
    for (int64_t i = 0; i < n; ++i) x[i] = activate<Kind::value>(x[i]);
  }
};

CONSISTENT_CLONES void activate_all(float* x, int64_t n, Activation kind) {
  visit_activation(kind, Activate<float>{x, n});
}
CONSISTENT_CLONES void activate_all(double* x, int64_t n, Activation kind) {
  visit_activation(kind, Activate<double>{x, n});
}

template <class R>
struct Write {
  void* out;
  const R* sums;
  int64_t n;
  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    T* __restrict__ to = static_cast<T*>(out);
    for (int64_t i = 0; i < n; ++i) to[i] = Storage<T>::store(sums[i]);
  }
};

CONSISTENT_CLONES void write(void* out, Dtype dtype, const float* sums, int64_t n) {
  visit_float_type(dtype, Write<float>{out, sums, n});
}
CONSISTENT_CLONES void write(void* out, Dtype dtype, const double* sums, int64_t n) {
  visit_float_type(dtype, Write<double>{out, sums, n});
}

// The sum of x - from over a row, or of its square. Each lane sums in R, so the bits depend on
// kLanes but not on the width of the vector registers.
template <class R>
CONSISTENT_INLINE double moment(const R* x, int64_t n, R from, bool squared) {
  R sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const R d = x[i + j] - from;
      sums[j] += squared ? d * d : d;
    }
  }
  for (; i < n; ++i) {
    const R d = x[i] - from;
    sums[i % kLanes] += squared ? d * d : d;
  }
  return sum_of_lanes<kLanes>(sums);
}

template <class R>
CONSISTENT_INLINE void normalize(R* x, int64_t n, const Epilogue& epilogue) {
  const double count = double(n);
  const R mean = epilogue.norm == Norm::layer ? R(moment(x, n, R(0), false) / count) : R(0);
  const R by = R(1 / std::sqrt(moment(x, n, mean, true) / count + epilogue.eps));
  const R* weight = static_cast<const R*>(epilogue.weight);
  const R* bias = static_cast<const R*>(epilogue.norm_bias);
  if (weight != nullptr && bias != nullptr) {
    for (int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * by * weight[i] + bias[i];
  } else if (weight != nullptr) {
    for (int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * by * weight[i];
  } else {
    for (int64_t i = 0; i < n; ++i) x[i] = (x[i] - mean) * by;
    for (int64_t i = 0; bias != nullptr && i < n; ++i) x[i] += bias[i];
  }
}

CONSISTENT_CLONES void normalize_row(float* x, int64_t n, const Epilogue& epilogue) {
  normalize(x, n, epilogue);
}
CONSISTENT_CLONES void normalize_row(double* x, int64_t n, const Epilogue& epilogue) {
  normalize(x, n, epilogue);
}

template <class R>
struct Reduce {
  char *out, *total;
  Dtype dtype;
  const Parts& parts;
  const Epilogue& epilogue;
  const RowsOfSlice& slice;

  // The activated sums of `n` elements of row r, from `column` on. `total` is written before the
  // activation and is rounded to `dtype`; `sums` stays unrounded.
  void stretch(R* sums, int64_t r, int64_t column, int64_t n) const {
    const int64_t at = r * slice.columns + column;
    add_parts(sums, parts, slice.start(r) + column, n);
    if (epilogue.scale != 1 || epilogue.bias != nullptr || epilogue.residual != nullptr) {
      shift(parts.dtype, Shift{sums, epilogue, at, column, n});
    }
    if (total != nullptr) write(total + at * size_of(dtype), dtype, sums, n);
    if (epilogue.activation != Activation::none) activate_all(sums, n, epilogue.activation);
  }

  void plain(int64_t begin, int64_t end) const {
    alignas(64) R sums[kStretch];
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < slice.columns; c += kStretch) {
        const int64_t n = std::min(kStretch, slice.columns - c);
        stretch(sums, r, c, n);
        write(out + (r * slice.columns + c) * size_of(dtype), dtype, sums, n);
      }
    }
  }

  void normalized(int64_t begin, int64_t end) const {
    std::vector<R> row(size_t(slice.columns));
    for (int64_t r = begin; r < end; ++r) {
      for (int64_t c = 0; c < slice.columns; c += kStretch) {
        stretch(row.data() + c, r, c, std::min(kStretch, slice.columns - c));
      }
      normalize_row(row.data(), slice.columns, epilogue);
      write(out + r * slice.columns * size_of(dtype), dtype, row.data(), slice.columns);
    }
  }
};

template <class R>
void reduce(const Reduce<R>& it, int64_t begin, int64_t end) {
  if (it.epilogue.norm == Norm::none) return it.plain(begin, end);
  it.normalized(begin, end);
}

}  // namespace

void reduce_shards_cpu(void* out, void* total, Dtype dtype, const Parts& parts,
                       const Epilogue& epilogue, const RowsOfSlice& slice, int64_t begin,
                       int64_t end) {
  char *to = static_cast<char*>(out), *sum = static_cast<char*>(total);
  if (parts.dtype == Dtype::f64) {
    return reduce(Reduce<double>{to, sum, dtype, parts, epilogue, slice}, begin, end);
  }
  reduce(Reduce<float>{to, sum, dtype, parts, epilogue, slice}, begin, end);
}

}  // namespace consistent
