// Functions of float32 to a few units in the last place: on CUDA by the processor's own
// instructions, a few for each. For results of which no bits are promised; those that must have the
// same bits everywhere use philox.h.

#pragma once

#include "philox.h"

namespace consistent {

// e^x; x is far below 2^16 where the result is neither 0 nor infinity, so x log2(e) is exact
// enough. On CUDA it is 0 where it is below 2^-126: exp2f spends three instructions on those.
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

// a / b; 0 on CUDA where b is beyond 2^126, or a or the quotient below 2^-126.
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
