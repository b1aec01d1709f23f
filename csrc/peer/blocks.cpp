#include "blocks.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "../kernels/clones.h"

namespace consistent::peer {
namespace {

// ---- loops over the numbers of a block, which the compiler vectorizes ---------------------------

// Of the absolute values, taken as integers: so a NaN is the largest, before infinity.
CONSISTENT_CLONES uint32_t largest(const float* x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t bits = bits_as<uint32_t>(x[i]) & 0x7FFFFFFFu;
    most = bits > most ? bits : most;
  }
  return most;
}

inline float divided(float x, float scale, float most) {
  const float made = x / scale;
  return made > most ? most : made < -most ? -most : made;
}

CONSISTENT_CLONES void to_int8(uint8_t* to, const float* from, float scale, int64_t n) {
  constexpr float kRounds = 12582912.0f;  // 1.5 * 2^23: the sum has no bits behind the point
  for (int64_t i = 0; i < n; ++i) {
    to[i] = uint8_t(int32_t(divided(from[i], scale, 127.0f) + kRounds - kRounds));
  }
}

CONSISTENT_CLONES void from_int8(float* to, const uint8_t* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(int8_t(from[i])) * scale;
}

// Rounds to nearest, ties to even. What is below the smallest normal number, 2^-6, is rounded by a
// sum with 2^14, whose last bit is worth 2^-9.
CONSISTENT_CLONES void to_fp8(uint8_t* to, const float* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t word = bits_as<uint32_t>(divided(from[i], scale, 448.0f));
    const uint32_t rest = word & 0x7FFFFFFFu;
    const uint32_t tiny = bits_as<uint32_t>(bits_as<float>(rest) + 0x1p14f) - 0x46800000u;
    const uint32_t normal = (rest - 0x3C000000u + 0x7FFFFu + ((rest >> 20) & 1u)) >> 20;
    to[i] = uint8_t(word >> 24 & 0x80u) | uint8_t(rest < 0x3C800000u ? tiny : normal);
  }
}

CONSISTENT_CLONES void from_fp8(float* to, const uint8_t* from, float scale, int64_t n) {
  for (int64_t i = 0; i < n; ++i) {
    const uint32_t byte = from[i], rest = byte & 0x7Fu;
    const float normal = bits_as<float>((rest << 20) + 0x3C000000u);
    const float tiny = float(int32_t(rest)) * 0x1p-9f;
    const uint32_t magnitude = bits_as<uint32_t>(rest < 8u ? tiny : normal);
    to[i] = bits_as<float>((byte & 0x80u) << 24 | magnitude) * scale;
  }
}

#define LOOPS(NAME, T)                                                                        \
  CONSISTENT_CLONES void wide_##NAME(Real<T>* to, const void* from, int64_t n) {              \
    for (int64_t i = 0; i < n; ++i) to[i] = Storage<T>::load(static_cast<const T*>(from)[i]); \
  }                                                                                           \
  CONSISTENT_CLONES void narrow_##NAME(void* to, const Real<T>* from, int64_t n) {            \
    for (int64_t i = 0; i < n; ++i) static_cast<T*>(to)[i] = Storage<T>::store(from[i]);      \
  }                                                                                           \
  void wide(T, Real<T>* to, const void* from, int64_t n) { wide_##NAME(to, from, n); }        \
  void narrow(T, void* to, const Real<T>* from, int64_t n) { narrow_##NAME(to, from, n); }

LOOPS(f32, float)
LOOPS(f64, double)
LOOPS(f16, Half)
LOOPS(bf16, BFloat16)

#define SUMS(NAME, R)                                                                   \
  CONSISTENT_CLONES void add_##NAME(R* to, const R* more, int64_t n) {                  \
    for (int64_t i = 0; i < n; ++i) to[i] += more[i];                                   \
  }                                                                                     \
  CONSISTENT_CLONES void left_##NAME(R* to, const R* total, const R* said, int64_t n) { \
    for (int64_t i = 0; i < n; ++i) {                                                   \
      const R left = total[i] - said[i];                                                \
      to[i] = left - left == R(0) ? left : R(0);                                        \
    }                                                                                   \
  }                                                                                     \
  inline void add(R* to, const R* more, int64_t n) { add_##NAME(to, more, n); }         \
  inline void left(R* to, const R* total, const R* said, int64_t n) {                   \
    left_##NAME(to, total, said, n);                                                    \
  }

SUMS(float, float)
SUMS(double, double)

CONSISTENT_CLONES void as_float(float* to, const double* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = float(from[i]);
}
CONSISTENT_CLONES void as_double(double* to, const float* from, int64_t n) {
  for (int64_t i = 0; i < n; ++i) to[i] = double(from[i]);
}

// ---- one block ----------------------------------------------------------------------------------

template <class R>
using Numbers = std::array<R, kNumbers>;

// `x` as float32, in `kept` if it is not.
const float* in_float(Numbers<float>&, const Numbers<float>& x, int64_t) { return x.data(); }
const float* in_float(Numbers<float>& kept, const Numbers<double>& x, int64_t n) {
  as_float(kept.data(), x.data(), n);
  return kept.data();
}

float write_block(uint8_t* to, const float* x, int64_t n, Code code) {
  const float most = code == Code::int8 ? 127.0f : 448.0f;
  const float scale = bits_as<float>(largest(x, n)) / most;
  if (!std::isfinite(scale)) {
    memset(to, 0, size_t(n));
    return NAN;
  }
  // A scale that is too small for a float32 is 0, and so are the numbers.
  (code == Code::int8 ? to_int8 : to_fp8)(to, x, scale == 0 ? 1.0f : scale, n);
  return scale;
}

void read_block(Numbers<float>& to, const uint8_t* from, float scale, int64_t n, Code code) {
  (code == Code::int8 ? from_int8 : from_fp8)(to.data(), from, scale, n);
}

void read_block(Numbers<double>& to, const uint8_t* from, float scale, int64_t n, Code code) {
  Numbers<float> made;
  read_block(made, from, scale, n, code);
  as_double(to.data(), made.data(), n);
}

float scale_at(const uint8_t* message, int64_t block) {
  float scale;
  memcpy(&scale, message + block * int64_t(sizeof(scale)), sizeof(scale));
  return scale;
}

// Calls visit(block, first, count) for each block.
template <class Visit>
void each_block(int64_t n, int64_t begin, int64_t end, const Visit& visit) {
  for (int64_t block = begin; block < end; ++block) {
    const int64_t first = block * kNumbers;
    visit(block, first, std::min(kNumbers, n - first));
  }
}

template <class T>
void write_all(uint8_t* message, const T* x, T* unsent, int64_t n, Code code, int64_t begin,
               int64_t end) {
  using R = Real<T>;
  uint8_t* numbers = message + int64_t(sizeof(float)) * blocks_of(n);
  Numbers<R> total, said;
  Numbers<float> kept;
  each_block(n, begin, end, [&](int64_t block, int64_t first, int64_t count) {
    wide(T(), total.data(), x + first, count);
    if (unsent != nullptr) {
      wide(T(), said.data(), unsent + first, count);
      add(total.data(), said.data(), count);
    }
    const float* floats = in_float(kept, total, count);
    const float scale = write_block(numbers + first, floats, count, code);
    memcpy(message + block * int64_t(sizeof(scale)), &scale, sizeof(scale));
    if (unsent == nullptr) return;
    read_block(said, numbers + first, scale, count, code);
    left(said.data(), total.data(), said.data(), count);
    narrow(T(), unsent + first, said.data(), count);
  });
}

template <class T>
void read_all(T* out, const uint8_t* const* messages, int count, int64_t n, Code code,
              int64_t begin, int64_t end) {
  using R = Real<T>;
  Numbers<R> total, next;
  each_block(n, begin, end, [&](int64_t block, int64_t first, int64_t size) {
    for (int k = 0; k < count; ++k) {
      const uint8_t* numbers = messages[k] + int64_t(sizeof(float)) * blocks_of(n) + first;
      read_block(k == 0 ? total : next, numbers, scale_at(messages[k], block), size, code);
      if (k > 0) add(total.data(), next.data(), size);
    }
    narrow(T(), out + first, total.data(), size);
  });
}

}  // namespace

void write_blocks(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n, Code code,
                  int64_t begin, int64_t end) {
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    write_all(message, static_cast<const T*>(x), static_cast<T*>(unsent), n, code, begin, end);
  });
}

void read_blocks(void* out, const uint8_t* const* messages, int count, Dtype dtype, int64_t n,
                 Code code, int64_t begin, int64_t end) {
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    read_all(static_cast<T*>(out), messages, count, n, code, begin, end);
  });
}

}  // namespace consistent::peer
