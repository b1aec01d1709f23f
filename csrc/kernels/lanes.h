// Independent partial sums ("lanes"), which the compiler holds in vector registers. Their number is
// fixed, so that a sum has the same bits for every width of vector registers.

#pragma once

#include "portable.h"

namespace consistent {

constexpr int kLanes = 64;

// The sum of kCount lanes, a power of two: adds the upper half to the lower half until one number
// is left. Overwrites the lanes.
template <int kCount, class R>
CONSISTENT_HOST_INLINE R sum_of_lanes(R* lanes) {
  for (int half = kCount / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

}  // namespace consistent
