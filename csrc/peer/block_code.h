// One number of a block and its byte, in the same bits on the CPU and on a GPU; blocks.h says what
// a message is.

#pragma once

#include <cstdint>

#include "../kernels/portable.h"

namespace consistent::peer {

enum class Code { int8, fp8 };

constexpr int64_t kNumbers = 256;  // of a block

CONSISTENT_INLINE int64_t blocks_of(int64_t n) { return (n + kNumbers - 1) / kNumbers; }
CONSISTENT_INLINE int64_t bytes_of(int64_t n) { return n + int64_t(sizeof(float)) * blocks_of(n); }

// What the largest number of a block is written as.
CONSISTENT_INLINE float most_of(Code code) { return code == Code::int8 ? 127.0f : 448.0f; }

// An absolute value as an integer: so a NaN is the largest, before infinity.
CONSISTENT_INLINE uint32_t magnitude_of(float x) { return bits_as<uint32_t>(x) & 0x7FFFFFFFu; }

// The scale of a block with this largest magnitude; NaN where it is not finite.
CONSISTENT_INLINE float scale_of(uint32_t largest, Code code) {
  const float scale = bits_as<float>(largest) / most_of(code);
  return scale - scale == 0.0f ? scale : bits_as<float>(0x7FC00000u);
}

// What numbers are divided by: a scale that is too small for a float32 is 0, and so are they.
CONSISTENT_INLINE float divisor_of(float scale) { return scale == 0.0f ? 1.0f : scale; }

CONSISTENT_INLINE float divided(float x, float by, float most) {
  const float made = x / by;
  return made > most ? most : made < -most ? -most : made;
}

CONSISTENT_INLINE uint8_t to_int8(float x, float by) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: the sum has no bits behind the point
  return uint8_t(int32_t(divided(x, by, 127.0f) + kRounds - kRounds));
}

CONSISTENT_INLINE float from_int8(uint8_t byte, float scale) { return float(int8_t(byte)) * scale; }

// Rounds to nearest, ties to even. What is below the smallest normal number, 2^-6, is rounded by a
// sum with 2^14, whose last bit is worth 2^-9.
CONSISTENT_INLINE uint8_t to_fp8(float x, float by) {
  const uint32_t word = bits_as<uint32_t>(divided(x, by, 448.0f));
  const uint32_t rest = word & 0x7FFFFFFFu;
  const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(rest) + 0x1p14f) - 0x46800000u;
  const uint32_t normal = (rest - 0x3C000000u + 0x7FFFFu + ((rest >> 20) & 1u)) >> 20;
  return uint8_t(word >> 24 & 0x80u) | uint8_t(rest < 0x3C800000u ? tiny : normal);
}

CONSISTENT_INLINE float from_fp8(uint8_t byte, float scale) {
  const uint32_t rest = byte & 0x7Fu;
  const float normal = bits_as<float>((rest << 20) + 0x3C000000u);
  const float tiny = float(int32_t(rest)) * 0x1p-9f;
  const uint32_t magnitude = bits_as<uint32_t>(rest < 8u ? tiny : normal);
  return bits_as<float>((uint32_t(byte) & 0x80u) << 24 | magnitude) * scale;
}

// `total` less what was said of it, 0 where that is not finite.
template <class R>
CONSISTENT_INLINE R left_of(R total, R said) {
  const R left = total - said;
  return left - left == R(0) ? left : R(0);
}

}  // namespace consistent::peer
