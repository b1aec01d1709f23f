// One functor per distribution, which makes two values from two random words. CPU and CUDA run the
// same code.

#pragma once

#include "random.h"

namespace consistent {

template <class R>
using WordOf = std::conditional_t<std::is_same<R, double>::value, uint64_t, uint32_t>;

template <class R>
struct Uniform {
  using Word = WordOf<R>;
  using Value = R;
  R low, span, bottom, top;
  explicit Uniform(const Distribution& d)
      : low(R(d.a)), span(R(d.b - d.a)), bottom(R(d.bottom)), top(R(d.top)) {}
  CONSISTENT_INLINE R one(Word w) const {
    R v = fused(unit(w), span, low);
    v = v < bottom ? bottom : v;
    return v > top ? top : v;
  }
  CONSISTENT_INLINE void operator()(Word x, Word y, R& a, R& b) const { a = one(x), b = one(y); }
};

template <class R>
struct Normal {
  using Word = WordOf<R>;
  using Value = R;
  R mean, deviation;
  explicit Normal(const Distribution& d) : mean(R(d.a)), deviation(R(d.b)) {}
  CONSISTENT_INLINE void operator()(Word x, Word y, R& a, R& b) const {
    normal_pair(x, y, a, b);
    a = fused(a, deviation, mean);
    b = fused(b, deviation, mean);
  }
};

template <class R>
struct LogNormal {
  using Word = WordOf<R>;
  using Value = R;
  Normal<R> normal;
  explicit LogNormal(const Distribution& d) : normal(d) {}
  CONSISTENT_INLINE void operator()(Word x, Word y, R& a, R& b) const {
    normal(x, y, a, b);
    a = exponential(a);
    b = exponential(b);
  }
};

template <class R>
struct Exponential {
  using Word = WordOf<R>;
  using Value = R;
  R rate;
  explicit Exponential(const Distribution& d) : rate(R(d.a)) {}
  CONSISTENT_INLINE R one(Word w) const { return -log_unit(w) / rate; }
  CONSISTENT_INLINE void operator()(Word x, Word y, R& a, R& b) const { a = one(x), b = one(y); }
};

template <class R>
struct Cauchy {
  using Word = WordOf<R>;
  using Value = R;
  R median, scale;
  explicit Cauchy(const Distribution& d) : median(R(d.a)), scale(R(d.b)) {}
  CONSISTENT_INLINE R one(Word w) const {
    const Word quarter = Word(1) << (8 * sizeof(Word) - 2);
    // The tangent over half a turn. The last bit is set so that the cosine is never 0.
    R sine, cosine;
    sine_cosine(Word(((w >> 1) | Word(1)) - quarter), sine, cosine);
    return fused(sine / cosine, scale, median);
  }
  CONSISTENT_INLINE void operator()(Word x, Word y, R& a, R& b) const { a = one(x), b = one(y); }
};

struct Bernoulli {
  using Word = uint32_t;
  using Value = int32_t;
  uint32_t last;
  int32_t success;
  explicit Bernoulli(const Distribution& d) : last(d.last), success(int32_t(d.a)) {}
  CONSISTENT_INLINE void operator()(Word x, Word y, int32_t& a, int32_t& b) const {
    a = x <= last ? success : 0;
    b = y <= last ? success : 0;
  }
};

// For 0 < range <= 2^32.
struct NarrowInteger {
  using Word = uint32_t;
  using Value = int64_t;
  uint64_t low, range;
  explicit NarrowInteger(const Distribution& d) : low(uint64_t(d.low)), range(d.range) {}
  CONSISTENT_INLINE int64_t one(Word w) const {
    // w * range as w * factor + w: `factor` fits in 32 bits, where `range` may be 2^32.
    const uint32_t factor = uint32_t(range - 1);
    return int64_t(low + ((uint64_t(w) * factor + w) >> 32));
  }
  CONSISTENT_INLINE void operator()(Word x, Word y, int64_t& a, int64_t& b) const {
    a = one(x), b = one(y);
  }
};

struct WideInteger {
  using Word = uint64_t;
  using Value = int64_t;
  uint64_t low, range;
  explicit WideInteger(const Distribution& d) : low(uint64_t(d.low)), range(d.range) {}
  CONSISTENT_INLINE int64_t one(Word w) const {
    return int64_t(low + (range == 0 ? w : multiply_high(w, range)));
  }
  CONSISTENT_INLINE void operator()(Word x, Word y, int64_t& a, int64_t& b) const {
    a = one(x), b = one(y);
  }
};

struct Geometric {
  using Word = uint64_t;
  using Value = double;
  double log_failure, most;
  explicit Geometric(const Distribution& d) : log_failure(d.a), most(d.b) {}
  CONSISTENT_INLINE double one(Word w) const {
    double v = ceil(log_unit(w) / log_failure);
    v = v < 1.0 ? 1.0 : v;
    return v > most ? most : v;
  }
  CONSISTENT_INLINE void operator()(Word x, Word y, double& a, double& b) const {
    a = one(x), b = one(y);
  }
};

// Calls run(functor, T()) with the functor of a distribution of real values, for a floating T.
template <class T, class Run>
CONSISTENT_HOST_INLINE void visit_real(const Distribution& d, const Run& run) {
  switch (d.kind) {
    case Kind::uniform:
      return run(Uniform<Real<T>>(d), T());
    case Kind::normal:
      return run(Normal<Real<T>>(d), T());
    case Kind::log_normal:
      return run(LogNormal<Real<T>>(d), T());
    case Kind::exponential:
      return run(Exponential<Real<T>>(d), T());
    default:
      return run(Cauchy<Real<T>>(d), T());
  }
}

template <class T, class Run>
CONSISTENT_HOST_INLINE void visit_whole(const Distribution& d, const Run& run) {
  switch (d.kind) {
    case Kind::bernoulli:
      return run(Bernoulli(d), T());
    case Kind::geometric:
      return run(Geometric(d), T());
    default:
      if (d.range != 0 && d.range <= uint64_t(1) << 32) return run(NarrowInteger(d), T());
      return run(WideInteger(d), T());
  }
}

template <class T, class Run>
CONSISTENT_HOST_INLINE void visit_floating(const Distribution& d, const Run& run) {
  if (d.kind < Kind::bernoulli) return visit_real<T>(d, run);
  return visit_whole<T>(d, run);
}

template <class Run>
CONSISTENT_HOST_INLINE void visit(Dtype dtype, const Distribution& d, const Run& run) {
  switch (dtype) {
    case Dtype::f32:
      return visit_floating<float>(d, run);
    case Dtype::f64:
      return visit_floating<double>(d, run);
    case Dtype::f16:
      return visit_floating<Half>(d, run);
    case Dtype::bf16:
      return visit_floating<BFloat16>(d, run);
    case Dtype::u8:
      return visit_whole<uint8_t>(d, run);
    case Dtype::i8:
      return visit_whole<int8_t>(d, run);
    case Dtype::i16:
      return visit_whole<int16_t>(d, run);
    case Dtype::i32:
      return visit_whole<int32_t>(d, run);
    case Dtype::i64:
      return visit_whole<int64_t>(d, run);
    case Dtype::boolean:
      return visit_whole<bool>(d, run);
  }
}

}  // namespace consistent
