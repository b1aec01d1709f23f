// What host and device code share, whichever compiler reads it.

#pragma once

#include <cstring>

#define CONSISTENT_HOST_INLINE inline __attribute__((always_inline))
#ifdef __CUDACC__
#define CONSISTENT_INLINE __host__ __device__ __forceinline__
#else
#define CONSISTENT_INLINE CONSISTENT_HOST_INLINE
#endif

namespace consistent {

// The same bits as a value of another type.
template <class To, class From>
CONSISTENT_INLINE To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "bits_as keeps the size");
  To to;
  memcpy(&to, &from, sizeof(to));
  return to;
}

}  // namespace consistent
