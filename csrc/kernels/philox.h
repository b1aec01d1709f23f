// Philox4x32-10 and the mathematics that turns its words into normals, for host and device alike.
//
// Every operation here is one that IEEE 754 rounds correctly (+, -, *, /, sqrt, fma, conversions)
// or acts on bits, so a value has the same bits on every processor, vector width and device. This
// requires that the compiler does not contract a * b + c into an fma by itself: -ffp-contract=off
// for the host compiler, -fmad=false for nvcc.
//
// Sources: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3" (Philox); Cephes (float
// polynomials) and fdlibm (double polynomials).

#pragma once

#include <cmath>
#include <cstdint>

#include "portable.h"

namespace consistent {

// Identifies the stream of numbers of one op: the seed is Philox's key, the counter counts ops.
struct Draw {
  uint64_t seed;
  uint64_t counter;
};

constexpr int kRounds = 10;

// Philox's two keys of each round, computed from the seed.
struct Seed {
  uint64_t seed;
  CONSISTENT_INLINE uint32_t first(int round) const {
    return uint32_t(seed) + uint32_t(round) * 0x9E3779B9u;
  }
  CONSISTENT_INLINE uint32_t second(int round) const {
    return uint32_t(seed >> 32) + uint32_t(round) * 0xBB67AE85u;
  }
};

// The same keys, computed ahead: passed as a kernel's parameter they cost its threads nothing.
struct RoundKeys {
  uint32_t firsts[kRounds], seconds[kRounds];
  explicit RoundKeys(Seed seed) {
    for (int round = 0; round < kRounds; ++round) {
      firsts[round] = seed.first(round), seconds[round] = seed.second(round);
    }
  }
  CONSISTENT_INLINE uint32_t first(int round) const { return firsts[round]; }
  CONSISTENT_INLINE uint32_t second(int round) const { return seconds[round]; }
};

// The four words of one counter value (block of the logical tensor, op counter).
template <class Keys>
CONSISTENT_INLINE void philox(const Keys& keys, uint64_t counter, uint32_t block_low,
                              uint32_t block_high, uint32_t out[4]) {
  uint32_t c0 = block_low, c1 = block_high;
  uint32_t c2 = uint32_t(counter), c3 = uint32_t(counter >> 32);
#ifdef __CUDA_ARCH__
#pragma unroll
#endif
  for (int round = 0; round < kRounds; ++round) {
    const uint64_t p0 = uint64_t(0xD2511F53u) * c0;
    const uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ keys.first(round);
    c1 = uint32_t(p1);
    c2 = uint32_t(p0 >> 32) ^ c3 ^ keys.second(round);
    c3 = uint32_t(p0);
  }
  out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

CONSISTENT_INLINE float fused(float a, float b, float c) { return fmaf(a, b, c); }
CONSISTENT_INLINE double fused(double a, double b, double c) { return fma(a, b, c); }
CONSISTENT_INLINE float root(float a) { return sqrtf(a); }
CONSISTENT_INLINE double root(double a) { return sqrt(a); }

// A uniform number in [0, 1), a multiple of 2^-24 or 2^-53. The integer is converted as a signed
// one, for which processors have an instruction.
CONSISTENT_INLINE float unit(uint32_t word) { return float(int32_t(word >> 8)) * 0x1p-24f; }
CONSISTENT_INLINE double unit(uint64_t word) { return double(int64_t(word >> 11)) * 0x1p-53; }

// ln((word + 1/2) / 2^bits), the logarithm of the middle of the word's interval in (0, 1), never
// -inf. Computed as e ln 2 + ln(1 + f) with 1 + f in [sqrt(1/2), sqrt(2)) and a polynomial in f.
// Near 1, f is computed from ~word, the word's distance to 1, which keeps all its bits.
CONSISTENT_INLINE float log_unit(uint32_t word) {
  const float u = fused(float(word), 0x1p-32f, 0x1p-33f);
  const uint32_t bits = bits_as<uint32_t>(u) + (0x3F800000u - 0x3F3504F3u);
  const bool near = word >= 0xC0000000u;
  const float e = near ? 0.0f : float(int32_t(bits >> 23) - 127);
  const float f = near ? -fused(float(~word), 0x1p-32f, 0x1p-33f)
                       : bits_as<float>((bits & 0x007FFFFFu) + 0x3F3504F3u) - 1.0f;
  const float z = f * f;
  float p = 7.0376836292E-2f;
  p = fused(p, f, -1.1514610310E-1f);
  p = fused(p, f, 1.1676998740E-1f);
  p = fused(p, f, -1.2420140846E-1f);
  p = fused(p, f, 1.4249322787E-1f);
  p = fused(p, f, -1.6668057665E-1f);
  p = fused(p, f, 2.0000714765E-1f);
  p = fused(p, f, -2.4999993993E-1f);
  p = fused(p, f, 3.3333331174E-1f);
  p = p * f * z;
  p = fused(e, -2.12194440E-4f, p);
  p = fused(z, -0.5f, p);
  return fused(e, 0.693359375f, f + p);
}

CONSISTENT_INLINE double log_unit(uint64_t word) {
  const double u = fused(double(word), 0x1p-64, 0x1p-65);
  const uint64_t bits = bits_as<uint64_t>(u) + (0x3FF0000000000000u - 0x3FE6A09E00000000u);
  const bool near = word >= 0xC000000000000000u;
  const double e = near ? 0.0 : double(int32_t(bits >> 52) - 1023);
  const double f = near ? -fused(double(~word), 0x1p-64, 0x1p-65)
                        : bits_as<double>((bits & 0x000FFFFFFFFFFFFFu) + 0x3FE6A09E00000000u) - 1.0;
  const double s = f / (2.0 + f);
  const double z = s * s;
  double p = 1.479819860511658591e-01;
  p = fused(p, z, 1.531383769920937332e-01);
  p = fused(p, z, 1.818357216161805012e-01);
  p = fused(p, z, 2.222219843214978396e-01);
  p = fused(p, z, 2.857142874366239149e-01);
  p = fused(p, z, 3.999999999940941908e-01);
  p = fused(p, z, 6.666666666666735130e-01);
  const double half_square = 0.5 * f * f;
  const double tail = fused(s, fused(p, z, half_square), e * 1.90821492927058770002e-10);
  return fused(e, 6.93147180369123816490e-01, f - (half_square - tail));
}

// e^x, 0 or infinity beyond the range. x is clamped first, so that n fits. The factor 2^n is
// applied as two factors, since 2^n itself may overflow where the result does not.
CONSISTENT_INLINE float exponential(float x) {
  x = x < -104.0f ? -104.0f : x;
  x = x > 89.0f ? 89.0f : x;
  const float shifted = fused(x, 1.44269504088896341f, 12582912.0f);  // 1.5 * 2^23: rounds
  const float n = shifted - 12582912.0f;
  const int32_t k = bits_as<int32_t>(shifted) - bits_as<int32_t>(12582912.0f);
  const float r = fused(n, 2.12194440E-4f, fused(n, -0.693359375f, x));
  float p = 1.9875691500E-4f;
  p = fused(p, r, 1.3981999507E-3f);
  p = fused(p, r, 8.3334519073E-3f);
  p = fused(p, r, 4.1665795894E-2f);
  p = fused(p, r, 1.6666665459E-1f);
  p = fused(p, r, 5.0000001201E-1f);
  p = fused(p, r * r, r) + 1.0f;
  const int32_t half = k >> 1;
  const float scale_low = bits_as<float>(uint32_t(half + 127) << 23);
  const float scale_high = bits_as<float>(uint32_t(k - half + 127) << 23);
  return p * scale_low * scale_high;
}

CONSISTENT_INLINE double exponential(double x) {
  x = x < -746.0 ? -746.0 : x;
  x = x > 710.0 ? 710.0 : x;
  const double shifted = fused(x, 1.44269504088896338700, 6755399441055744.0);  // 1.5 * 2^52
  const double n = shifted - 6755399441055744.0;
  const int64_t k = bits_as<int64_t>(shifted) - bits_as<int64_t>(6755399441055744.0);
  const double high = fused(n, -6.93147180369123816490e-01, x);
  const double low = n * 1.90821492927058770002e-10;
  const double r = high - low;
  const double t = r * r;
  double p = 4.13813679705723846039e-08;
  p = fused(p, t, -1.65339022054652515390e-06);
  p = fused(p, t, 6.61375632143793436117e-05);
  p = fused(p, t, -2.77777777770155933842e-03);
  p = fused(p, t, 1.66666666666666019037e-01);
  const double c = fused(-t, p, r);
  const double y = 1.0 - ((low - (r * c) / (2.0 - c)) - high);
  const int64_t half = k >> 1;
  const double scale_low = bits_as<double>(uint64_t(half + 1023) << 52);
  const double scale_high = bits_as<double>(uint64_t(k - half + 1023) << 52);
  return y * scale_low * scale_high;
}

// Sine and cosine of the angle turn / 2^bits of a full turn. The reduction to at most an eighth of
// a turn on either side of an axis is exact, since it is integer arithmetic.
CONSISTENT_INLINE void sine_cosine(uint32_t turn, float& sine, float& cosine) {
  const uint32_t quadrant = (turn + 0x20000000u) >> 30;
  const float r = float(int32_t(turn - (quadrant << 30))) * 1.46291807926715968e-09f;
  const float z = r * r;
  float s = -1.9515295891E-4f;
  s = fused(s, z, 8.3321608736E-3f);
  s = fused(s, z, -1.6666654611E-1f);
  s = fused(s * z, r, r);
  float c = 2.443315711809948E-5f;
  c = fused(c, z, -1.388731625493765E-3f);
  c = fused(c, z, 4.166664568298827E-2f);
  c = fused(c * z, z, fused(z, -0.5f, 1.0f));
  const uint32_t swap = 0u - (quadrant & 1u);  // all ones if sine and cosine change places
  const uint32_t a = bits_as<uint32_t>(s), b = bits_as<uint32_t>(c);
  const uint32_t sine_sign = (quadrant & 2u) << 30;
  const uint32_t cosine_sign = ((quadrant + 1u) & 2u) << 30;
  sine = bits_as<float>(((a & ~swap) | (b & swap)) ^ sine_sign);
  cosine = bits_as<float>(((b & ~swap) | (a & swap)) ^ cosine_sign);
}

CONSISTENT_INLINE void sine_cosine(uint64_t turn, double& sine, double& cosine) {
  const uint64_t quadrant = (turn + 0x2000000000000000u) >> 62;
  const double r = double(int64_t(turn - (quadrant << 62))) * 3.40612158008655459e-19;
  const double z = r * r;
  double s = 1.58969099521155010221e-10;
  s = fused(s, z, -2.50507602534068634195e-08);
  s = fused(s, z, 2.75573137070700676789e-06);
  s = fused(s, z, -1.98412698298579493134e-04);
  s = fused(s, z, 8.33333333332248946124e-03);
  s = fused(s, z, -1.66666666666666324348e-01);
  s = fused(s * z, r, r);
  double c = -1.13596475577881948265e-11;
  c = fused(c, z, 2.08757232129817482790e-09);
  c = fused(c, z, -2.75573143513906633035e-07);
  c = fused(c, z, 2.48015872894767294178e-05);
  c = fused(c, z, -1.38888888888741095749e-03);
  c = fused(c, z, 4.16666666666666019037e-02);
  const double half = 0.5 * z, w = 1.0 - half;
  c = w + fused(c * z, z, (1.0 - w) - half);
  const uint64_t swap = 0u - (quadrant & 1u);
  const uint64_t a = bits_as<uint64_t>(s), b = bits_as<uint64_t>(c);
  const uint64_t sine_sign = (quadrant & 2u) << 62;
  const uint64_t cosine_sign = ((quadrant + 1u) & 2u) << 62;
  sine = bits_as<double>(((a & ~swap) | (b & swap)) ^ sine_sign);
  cosine = bits_as<double>(((b & ~swap) | (a & swap)) ^ cosine_sign);
}

// Box-Muller: two words make two independent standard normals.
template <class Word, class Real>
CONSISTENT_INLINE void normal_pair(Word first, Word second, Real& x, Real& y) {
  const Real radius = root(Real(-2) * log_unit(first));
  Real sine, cosine;
  sine_cosine(second, sine, cosine);
  x = radius * cosine;
  y = radius * sine;
}

// The upper 64 bits of the product: maps a random word a to an integer in [0, b).
CONSISTENT_INLINE uint64_t multiply_high(uint64_t a, uint64_t b) {
#ifdef __CUDA_ARCH__
  return __umul64hi(a, b);
#else
  return uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
#endif
}

}  // namespace consistent
