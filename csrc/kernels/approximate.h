// Functions of float32 that are exact to a few units in the last place: on CUDA, a few hardware
// instructions each. For results whose bits may differ between devices; code that must give the
// same bits everywhere uses philox.h. The double versions call philox.h.

#pragma once

#include "philox.h"

namespace consistent {

// e^x. Wherever the result is neither 0 nor infinity, |x| is far below 2^16, so x log2(e) is exact
// enough in float32. On CUDA, results below 2^-126 are flushed to 0 (ftz): exp2f spends three more
// instructions on such results.
CONSISTENT_INLINE float approximate_exponential(float x) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
  float made;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(made) : "f"(x * 1.44269504088896341f));
  return made;
#else
  return exponential(x);
#endif
}
CONSISTENT_INLINE double approximate_exponential(double x) { return exponential(x); }

// a / b. On CUDA the result is 0 if |b| is above 2^126, or if |a| or the quotient is below 2^-126.
CONSISTENT_INLINE float approximate_quotient(float a, float b) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
  float made;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(made) : "f"(a), "f"(b));
  return made;
#else
  return a / b;
#endif
}
CONSISTENT_INLINE double approximate_quotient(double a, double b) { return a / b; }

// 1 / sqrt(x).
CONSISTENT_INLINE float approximate_inverse_root(float x) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__)
  return rsqrtf(x);
#else
  return 1 / root(x);
#endif
}
CONSISTENT_INLINE double approximate_inverse_root(double x) { return 1 / root(x); }

}  // namespace consistent
