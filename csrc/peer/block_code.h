// The conversion between a number of a block and its byte, with the same bits on the CPU and on a
// GPU. blocks.h describes the message.

#pragma once

#include <cmath>
#include <cstdint>

#include "../kernels/portable.h"

namespace consistent::peer {

enum class Code { int8, fp8 };

constexpr int64_t kNumbers = 256;  // numbers of a block

CONSISTENT_INLINE int64_t blocks_of(int64_t n) { return (n + kNumbers - 1) / kNumbers; }
CONSISTENT_INLINE int64_t bytes_of(int64_t n) { return n + int64_t(sizeof(float)) * blocks_of(n); }

// The code's largest value, as which the largest number of a block is written.
CONSISTENT_INLINE float most_of(Code code) { return code == Code::int8 ? 127.0f : 448.0f; }

// The bits of |x|. As integers they are ordered as the magnitudes are, and a NaN is above infinity.
CONSISTENT_INLINE uint32_t magnitude_of(float x) { return bits_as<uint32_t>(x) & 0x7FFFFFFFu; }

// The scale of a block with this largest magnitude; NaN if the magnitude is not finite.
CONSISTENT_INLINE float scale_of(uint32_t largest, Code code) {
  const float scale = bits_as<float>(largest) / most_of(code);
  return scale - scale == 0.0f ? scale : bits_as<float>(0x7FC00000u);
}

// The divisor of a block's numbers. A scale that underflows float32 is 0; its numbers are then
// written as 0 (divided by 1), not as 0 / 0.
CONSISTENT_INLINE float divisor_of(float scale) { return scale == 0.0f ? 1.0f : scale; }

// x / by, computed from `reciprocal`, the rounded 1 / by. It has the bits of the division, except
// for quotients below 2^-40, of which a byte keeps only the sign, and for the sign of -0. The
// remainder fmaf(-by, near, x) is exact, so only the last fmaf rounds.
// Source: Markstein, Computation of elementary functions on the IBM RISC System/6000 processor.
CONSISTENT_INLINE float quotient(float x, float by, float reciprocal) {
  const float near = x * reciprocal;
  return fmaf(fmaf(-by, near, x), reciprocal, near);
}

// Whether the reciprocal and the intermediate results of quotient() can neither overflow nor
// underflow in float32. If so, no quotient of the block rounds beyond the code's largest value
// either, so it needs no clamp.
CONSISTENT_INLINE bool has_reciprocal(float by) { return by > 0x1p-60f && by < 0x1p60f; }

// The byte of a quotient in [-127, 127]. The sum with 1.5 * 2^23 has no fractional bits, so the
// addition rounds to an integer, and the last byte of the sum is that integer.
CONSISTENT_INLINE uint8_t to_int8(float quotient) {
  return uint8_t(bits_as<uint32_t>(quotient + 0x1.8p23f));
}

// The reverse: the float with the bits 0x4B000000 | b is 2^23 + b. Here b is byte + 128, and
// 8388736 is 2^23 + 128.
CONSISTENT_INLINE float from_int8(uint8_t byte, float scale) {
  return (bits_as<float>(0x4B000000u | (byte ^ 0x80u)) - 8388736.0f) * scale;
}

// Rounds to nearest, ties to even. Below the smallest normal number, 2^-6, the sum with 2^14
// rounds, since its last bit is worth 2^-9, the step of e4m3's subnormal numbers.
CONSISTENT_INLINE uint8_t to_fp8(float quotient) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t made;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %1;" : "=h"(made) : "f"(quotient));
  return uint8_t(made);
#else
  const uint32_t word = bits_as<uint32_t>(quotient);
  const uint32_t rest = word & 0x7FFFFFFFu;
  const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(rest) + 0x1p14f) - 0x46800000u;
  const uint32_t normal = (rest - 0x3C000000u + 0x7FFFFu + ((rest >> 20) & 1u)) >> 20;
  return uint8_t(word >> 24 & 0x80u) | uint8_t(rest < 0x3C800000u ? tiny : normal);
#endif
}

CONSISTENT_INLINE float from_fp8(uint8_t byte, float scale) {
  const uint32_t rest = byte & 0x7Fu;
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  // The bits shifted to float32's position are the number times 2^-120, subnormal if it is.
  const float magnitude = bits_as<float>(rest << 20) * 0x1p120f;
  return bits_as<float>((uint32_t(byte) & 0x80u) << 24 | bits_as<uint32_t>(magnitude)) * scale;
#else
  const float normal = bits_as<float>((rest << 20) + 0x3C000000u);
  const float tiny = float(int32_t(rest)) * 0x1p-9f;
  const uint32_t magnitude = bits_as<uint32_t>(rest < 8u ? tiny : normal);
  return bits_as<float>((uint32_t(byte) & 0x80u) << 24 | magnitude) * scale;
#endif
}

// The rounding error of a message, total - said; 0 where that is not finite, so that one overflow
// does not stay in `unsent` forever.
template <class R>
CONSISTENT_INLINE R left_of(R total, R said) {
  const R left = total - said;
  return left - left == R(0) ? left : R(0);
}

}  // namespace consistent::peer
