// Combines the members' numbers, from the first member to the last. Two-byte floats are added in
// float32 and rounded once, at the end. The result has the same bits on every member and in every
// run.

#pragma once

#include <cstdint>

namespace consistent::peer {

enum class Type {
  int8,
  uint8,
  int16,
  uint16,
  int32,
  uint32,
  int64,
  uint64,
  float32,
  float64,
  float16,
  bfloat16,
  boolean,
};  // complex numbers are summed as pairs of floats

enum class Op { sum, max, min };

int size_of(Type type);

// out[i] = pieces[0][i] op pieces[1][i] op ...; `out` may be one of the pieces. If any piece has a
// NaN, the result is NaN. For booleans, sum and max are "or" and min is "and".
void reduce(void* out, const void* const* pieces, int count, int64_t elements, Type type, Op op);

}  // namespace consistent::peer
