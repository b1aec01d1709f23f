// Combining the members' numbers, first to last, in an accumulator that is wide enough to keep the
// sum of short floats until the end: the same bits on every member and from run to run.

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
};  // one byte and up; complex numbers are summed as pairs of floats

enum class Op { sum, max, min };

int size_of(Type type);

// out[i] = pieces[0][i] op pieces[1][i] op ...; `out` may be one of the pieces. NaN wins over all
// numbers. For booleans sum and max are or, min is and.
void reduce(void* out, const void* const* pieces, int count, int64_t elements, Type type, Op op);

}  // namespace consistent::peer
