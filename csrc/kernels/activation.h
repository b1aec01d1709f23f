// Activation functions, the same code for the CPU's vectorized loops and for CUDA.

#pragma once

#include <cmath>

#include "approximate.h"
#include "reduce_shards.h"

namespace consistent {

// erf to a few units in the last place of float32: an odd rational function on [-4, 4]. Beyond, x
// is clamped to 4, where the result is +-1.
// Source: Eigen, generic_fast_erf_float.
CONSISTENT_INLINE float error_function(float x) {
  x = clamped(x, 4.0f);
  const float z = x * x;
  float p = -2.72614225801306e-10f;
  p = fused(p, z, 2.77068142495902e-08f);
  p = fused(p, z, -2.10102402082508e-06f);
  p = fused(p, z, -5.69250639462346e-05f);
  p = fused(p, z, -7.34990630326855e-04f);
  p = fused(p, z, -2.95459980854025e-03f);
  p = fused(p, z, -1.60960333262415e-02f);
  float q = -1.45660718464996e-05f;
  q = fused(q, z, -2.13374055278905e-04f);
  q = fused(q, z, -1.68282697438203e-03f);
  q = fused(q, z, -7.37332916720468e-03f);
  q = fused(q, z, -1.42647390514189e-02f);
  return approximate_quotient(x * p, q);
}
CONSISTENT_INLINE double error_function(double x) { return erf(x); }

template <class R>
CONSISTENT_INLINE R sigmoid(R x) {
  return approximate_quotient(R(1), R(1) + approximate_exponential(-x));
}

template <Activation kind, class R>
CONSISTENT_INLINE R activate(R x) {
  if constexpr (kind == Activation::relu) return x < R(0) ? R(0) : x;  // NaN stays
  if constexpr (kind == Activation::gelu) {
    return R(0.5) * x * (R(1) + error_function(x * R(0.70710678118654752440)));
  }
  if constexpr (kind == Activation::gelu_tanh) {  // (1 + tanh u) / 2 = sigmoid(2 u)
    return x * sigmoid(R(1.5957691216057308) * fused(R(0.044715) * x * x, x, x));
  }
  if constexpr (kind == Activation::silu) return x * sigmoid(x);
  return x;
}

// An activation as a type, so that loops are compiled for each one. visit_activation calls
// run(constant), where decltype(constant)::value is the activation.
template <Activation kind>
struct ActivationOf {
  static constexpr Activation value = kind;
};

template <class Run>
CONSISTENT_HOST_INLINE void visit_activation(Activation kind, const Run& run) {
  switch (kind) {
    case Activation::relu:
      return run(ActivationOf<Activation::relu>());
    case Activation::gelu:
      return run(ActivationOf<Activation::gelu>());
    case Activation::gelu_tanh:
      return run(ActivationOf<Activation::gelu_tanh>());
    case Activation::silu:
      return run(ActivationOf<Activation::silu>());
    default:
      return run(ActivationOf<Activation::none>());
  }
}

}  // namespace consistent
