// Cross-entropy of split classes on the CPU. It takes a chunk of a row at a time, small enough that
// the second pass over the chunk, for the exponentials, hits the L1 cache. Rows whose classes are
// not contiguous (inner > 1) are transposed in strips of kStrip rows.

#include <algorithm>
#include <cmath>
#include <limits>

#include "clones.h"
#include "lanes.h"
#include "philox.h"
#include "split_cross_entropy.h"

namespace consistent {
namespace {

constexpr int64_t kChunk = 2048;  // classes of one row
constexpr int kStrip = 16;        // rows transposed together
constexpr int64_t kTurned = 256;  // classes of each row that are transposed at once
constexpr double kLeast = -std::numeric_limits<double>::infinity();

// The statistics of the part of a row that was read so far, in double for every dtype. `total` and
// `weighted` are relative to reference(), as on CUDA.
struct Row {
  double largest = kLeast;
  double total = 0;     // of exp(x - reference)
  double weighted = 0;  // of w (x - reference)
  double weights = 0;

  double reference() const { return largest == kLeast ? 0 : largest; }

  void raise(double seen) {
    const double before = reference(), was = largest;
    if (!(seen > largest)) return;
    largest = seen;
    if (was != kLeast) total *= std::exp(before - reference());
    if (weights != 0) weighted += weights * (before - reference());
  }
};

template <class T>
CONSISTENT_INLINE Real<T> largest_of(const T* x, int64_t n) {
  using R = Real<T>;
  R best[kLanes];
  std::fill(best, best + kLanes, -std::numeric_limits<R>::infinity());
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      const R value = Storage<T>::load(x[i + j]);
      best[j] = value > best[j] ? value : best[j];
    }
  }
  // A NaN compares as not larger, so it is left out here, and enters the sum of exponentials.
  for (; i < n; ++i) best[0] = std::max<R>(best[0], Storage<T>::load(x[i]));
  return *std::max_element(best, best + kLanes);
}

template <class T>
CONSISTENT_INLINE double sum_of_exponentials(const T* x, int64_t n, Real<T> reference) {
  using R = Real<T>;
  R sums[kLanes] = {};
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) {
      sums[j] += exponential(R(Storage<T>::load(x[i + j]) - reference));
    }
  }
  for (; i < n; ++i) sums[0] += exponential(R(Storage<T>::load(x[i]) - reference));
  return sum_of_lanes<kLanes>(sums);
}

// Adds the sum of w (x - reference) and the sum of w to `row`; a null w means 1 everywhere.
template <class T>
CONSISTENT_INLINE void weigh(const T* x, const Real<T>* w, int64_t n, Real<T> reference, Row& row) {
  using R = Real<T>;
  R sums[kLanes] = {}, weights[kLanes] = {};
  const auto add = [&](int lane, int64_t i) {
    const R by = w == nullptr ? R(1) : w[i];
    sums[lane] += by * (Storage<T>::load(x[i]) - reference);
    weights[lane] += by;
  };
  int64_t i = 0;
  for (; i + kLanes <= n; i += kLanes) {
    for (int j = 0; j < kLanes; ++j) add(j, i + j);
  }
  for (; i < n; ++i) add(0, i);
  row.weighted += sum_of_lanes<kLanes>(sums);
  row.weights += sum_of_lanes<kLanes>(weights);
}

struct AddChunk {
  Row& row;
  const void *x, *weight;
  int64_t n;
  bool smooth;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    const T* from = static_cast<const T*>(x);
    row.raise(largest_of(from, n));
    const Real<T> reference = Real<T>(row.reference());
    row.total += sum_of_exponentials(from, n, reference);
    if (smooth) weigh(from, static_cast<const Real<T>*>(weight), n, reference, row);
  }
};

CONSISTENT_CLONES void add_chunk(Dtype dtype, Row& row, const void* x, const void* weight,
                                 int64_t n, bool smooth) {
  visit_float_type(dtype, AddChunk{row, x, weight, n, smooth});
}

struct GradientChunk {
  double reference, scale, shift;
  void* gradient;
  const void *x, *weight;
  int64_t n;

  template <class T>
  CONSISTENT_INLINE void operator()(T) const {
    using R = Real<T>;
    const T* __restrict__ from = static_cast<const T*>(x);
    T* __restrict__ to = static_cast<T*>(gradient);
    const R* w = static_cast<const R*>(weight);
    const R m = R(reference), by = R(scale), less = R(shift);
    if (w == nullptr) {
      for (int64_t i = 0; i < n; ++i) {
        to[i] = Storage<T>::store(exponential(R(Storage<T>::load(from[i]) - m)) * by - less);
      }
      return;
    }
    for (int64_t i = 0; i < n; ++i) {
      to[i] = Storage<T>::store(exponential(R(Storage<T>::load(from[i]) - m)) * by - less * w[i]);
    }
  }
};

CONSISTENT_CLONES void gradient_chunk(Dtype dtype, const GradientChunk& chunk) {
  visit_float_type(dtype, chunk);
}

// Adjacent rows of one outer index: a single row if its classes are contiguous, else up to kStrip.
struct Strip {
  int64_t row, at;  // the first row, and the index of its first logit
  int count;
};

template <class Run>
void for_each_strip(const ClassSplit& split, int64_t begin, int64_t end, const Run& run) {
  const int64_t inner = split.inner, most = inner == 1 ? 1 : kStrip;
  for (int64_t row = begin; row < end;) {
    const int64_t o = row / inner, i = row - o * inner;
    const int64_t count = std::min({most, inner - i, end - row});
    run(Strip{row, o * split.held * inner + i, int(count)});
    row += count;
  }
}

// Transposes (class, row) to (row, class), with kTurned classes from one row to the next.
template <class T>
void turn(T* to, const T* from, int64_t classes, int rows, int64_t inner) {
  for (int64_t c = 0; c < classes; ++c) {
    for (int r = 0; r < rows; ++r) to[r * kTurned + c] = from[c * inner + r];
  }
}

template <class T>
void turn_back(T* to, const T* from, int64_t classes, int rows, int64_t inner) {
  for (int64_t c = 0; c < classes; ++c) {
    for (int r = 0; r < rows; ++r) to[c * inner + r] = from[r * kTurned + c];
  }
}

struct Forward {
  void* statistics;
  Dtype dtype;
  const void* logits;
  const int64_t* target;
  const void* weight;
  const ClassSplit& split;
  int64_t begin, end;

  template <class T>
  void operator()(T) const {
    using R = Real<T>;
    const T* x = static_cast<const T*>(logits);
    for_each_strip(split, begin, end, [&](const Strip& strip) {
      Row rows[kStrip];
      read(x + strip.at, strip.count, rows, static_cast<const R*>(weight));
      for (int r = 0; r < strip.count; ++r) write<T>(strip.row + r, x + strip.at + r, rows[r]);
    });
  }

  template <class T>
  void read(const T* x, int count, Row* rows, const Real<T>* w) const {
    T turned[kStrip * kTurned];
    const int64_t inner = split.inner, step = inner == 1 ? kChunk : kTurned;
    for (int64_t c = 0; c < split.held; c += step) {
      const int64_t n = std::min(step, split.held - c);
      const Real<T>* by = w == nullptr ? nullptr : w + c;
      if (inner == 1) {
        add_chunk(dtype, rows[0], x + c, by, n, split.smooth);
        continue;
      }
      turn(turned, x + c * inner, n, count, inner);
      for (int r = 0; r < count; ++r) {
        add_chunk(dtype, rows[r], turned + r * kTurned, by, n, split.smooth);
      }
    }
  }

  template <class T>
  void write(int64_t at, const T* x, const Row& row) const {
    using R = Real<T>;
    const int64_t rows = split.outer * split.inner, place = target[at] - split.start;
    const bool here = place >= 0 && place < split.held;
    R* to = static_cast<R*>(statistics) + at;
    to[0] = R(row.largest);
    to[rows] = R(row.total);
    to[2 * rows] = here ? R(Storage<T>::load(x[place * split.inner])) : R(0);
    if (!split.smooth) return;
    to[3 * rows] = R(row.weighted);
    to[4 * rows] = R(row.weights);
  }
};

struct Gradient {
  void* gradient;
  Dtype dtype;
  const void* logits;
  const int64_t* target;
  const void *rows, *weight;
  const ClassSplit& split;
  int64_t begin, end;

  template <class T>
  void operator()(T) const {
    const T* x = static_cast<const T*>(logits);
    T* to = static_cast<T*>(gradient);
    for_each_strip(split, begin, end, [&](const Strip& strip) {
      fill(to + strip.at, x + strip.at, strip);
      for (int r = 0; r < strip.count; ++r)
        pick(to + strip.at + r, x + strip.at + r, strip.row + r);
    });
  }

  template <class T>
  Real<T> plane(int p, int64_t row) const {
    return static_cast<const Real<T>*>(rows)[p * split.outer * split.inner + row];
  }

  template <class T>
  void fill(T* to, const T* x, const Strip& strip) const {
    T given[kStrip * kTurned], made[kStrip * kTurned];
    const int64_t inner = split.inner, step = inner == 1 ? kChunk : kTurned;
    for (int64_t c = 0; c < split.held; c += step) {
      const int64_t n = std::min(step, split.held - c);
      if (inner == 1) {
        one(to + c, x + c, c, n, strip.row);
        continue;
      }
      turn(given, x + c * inner, n, strip.count, inner);
      for (int r = 0; r < strip.count; ++r) {
        one(made + r * kTurned, given + r * kTurned, c, n, strip.row + r);
      }
      turn_back(to + c * inner, made, n, strip.count, inner);
    }
  }

  template <class T>
  void one(T* to, const T* x, int64_t c, int64_t n, int64_t row) const {
    const Real<T> scale = plane<T>(1, row), shift = plane<T>(2, row);
    if (scale == 0 && shift == 0 && plane<T>(3, row) == 0) {
      std::fill(to, to + n, Storage<T>::store(Real<T>(0)));
      return;
    }
    const void* w = weight == nullptr ? nullptr : static_cast<const Real<T>*>(weight) + c;
    gradient_chunk(dtype, {double(plane<T>(0, row)), double(scale), double(shift), to, x, w, n});
  }

  // Computes the target's element again, with `pick` subtracted before the rounding to T: taken
  // from the stored element, `pick` would add a second rounding.
  template <class T>
  void pick(T* to, const T* x, int64_t row) const {
    using R = Real<T>;
    const int64_t place = target[row] - split.start, at = place * split.inner;
    const R less = plane<T>(3, row);
    if (place < 0 || place >= split.held || less == 0) return;
    const R w = weight == nullptr ? R(1) : static_cast<const R*>(weight)[place];
    const R share = exponential(R(Storage<T>::load(x[at]) - plane<T>(0, row))) * plane<T>(1, row);
    to[at] = Storage<T>::store(R(share - plane<T>(2, row) * w - less));
  }
};

}  // namespace

void split_cross_entropy_cpu(void* statistics, Dtype dtype, const void* logits,
                             const int64_t* target, const void* weight, const ClassSplit& split,
                             int64_t begin, int64_t end) {
  visit_float_type(dtype, Forward{statistics, dtype, logits, target, weight, split, begin, end});
}

void split_cross_entropy_backward_cpu(void* gradient, Dtype dtype, const void* logits,
                                      const int64_t* target, const void* rows, const void* weight,
                                      const ClassSplit& split, int64_t begin, int64_t end) {
  visit_float_type(dtype,
                   Gradient{gradient, dtype, logits, target, rows, weight, split, begin, end});
}

}  // namespace consistent
