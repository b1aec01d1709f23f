// Macros and functions for code that is compiled for both host and device.

#pragma once

#include <cstring>

#define CONSISTENT_HOST_INLINE inline __attribute__((always_inline))
#ifdef __CUDACC__
#define CONSISTENT_INLINE __host__ __device__ __forceinline__
#else
#define CONSISTENT_INLINE CONSISTENT_HOST_INLINE
#endif

namespace consistent {

// The same bits as a value of another type (std::bit_cast is C++20).
template <class To, class From>
CONSISTENT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

// x clamped to [-most, most]; a NaN stays a NaN.
CONSISTENT_INLINE float clamped(float x, float most) {
#if defined(__CUDA_ARCH__) && defined(__CUDACC__) && __CUDA_ARCH__ >= 800
  float made;
  asm("{ .reg .f32 low; max.NaN.f32 low, %1, %2; min.NaN.f32 %0, low, %3; }"
      : "=f"(made)
      : "f"(x), "f"(-most), "f"(most));
  return made;
#else
  return x > most ? most : x < -most ? -most : x;
#endif
}

}  // namespace consistent
