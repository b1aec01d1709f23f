// Partial sums kept side by side, so that the compiler can hold them in vector registers.

#pragma once

#include "portable.h"

namespace consistent {

constexpr int kLanes = 64;

// The sum of `kCount` lanes, by adding the upper half to the lower one until one number is left.
template <int kCount, class R>
CONSISTENT_HOST_INLINE R sum_of_lanes(R* lanes) {
  for (int half = kCount / 2; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) lanes[j] += lanes[j + half];
  }
  return lanes[0];
}

}  // namespace consistent
