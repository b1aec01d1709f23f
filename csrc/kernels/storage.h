// The element types of tensors, and how a value is rounded to each of them.

#pragma once

#include <cstdint>
#include <type_traits>

#include "portable.h"

namespace consistent {

enum class Dtype { f32, f64, f16, bf16, u8, i8, i16, i32, i64, boolean };

inline int size_of(Dtype dtype) {
  switch (dtype) {
    case Dtype::f64:
    case Dtype::i64:
      return 8;
    case Dtype::f32:
    case Dtype::i32:
      return 4;
    case Dtype::f16:
    case Dtype::bf16:
    case Dtype::i16:
      return 2;
    default:
      return 1;
  }
}

struct Half {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};

// The type in which arithmetic on T is done before the result is rounded to T.
template <class T>
using Real = std::conditional_t<std::is_same<T, double>::value, double, float>;

// Rounds to nearest, ties to even, as the hardware does. On the CPU the sum in `base` rounds at
// f16's last bit, for normal and subnormal results alike (Dukhan's FP16 conversion). A NaN becomes
// the one quiet NaN with its sign on both, since the PTX instruction gives another one.
CONSISTENT_INLINE Half to_half(float value) {
  const uint32_t word = bits_as<uint32_t>(value);
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  Half made;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(made.bits) : "f"(value));
  return value == value ? made : Half{uint16_t((word >> 31 << 15) | 0x7E00u)};
#else
  const uint32_t doubled = word + word;
  const float magnitude = bits_as<float>(word & 0x7FFFFFFFu);
  const uint32_t exponent = doubled & 0xFF000000u;
  const uint32_t bias = exponent < 0x71000000u ? 0x71000000u : exponent;
  const float base = bits_as<float>((bias >> 1) + 0x07800000u) + (magnitude * 0x1p112f) * 0x1p-110f;
  const uint32_t bits = bits_as<uint32_t>(base);
  const uint32_t rounded = ((bits >> 13) & 0x7C00u) + (bits & 0x0FFFu);
  return Half{uint16_t((word >> 31 << 15) | (doubled > 0xFF000000u ? 0x7E00u : rounded))};
#endif
}

CONSISTENT_INLINE float from_half(Half half) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__)
  float made;
  asm("cvt.f32.f16 %0, %1;" : "=f"(made) : "h"(half.bits));
  return made;
#else
  const uint32_t word = uint32_t(half.bits) << 16;
  const uint32_t doubled = word + word;
  const float normal = bits_as<float>((doubled >> 4) + (0xE0u << 23)) * 0x1p-112f;
  const float subnormal = bits_as<float>((doubled >> 17) | (126u << 23)) - 0.5f;
  const uint32_t bits = bits_as<uint32_t>(doubled < (1u << 27) ? subnormal : normal);
  return bits_as<float>((word & 0x80000000u) | bits);
#endif
}

// Rounds to nearest, ties to even; every NaN becomes 0x7FC0.
CONSISTENT_INLINE BFloat16 to_bfloat16(float value) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  BFloat16 made;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(made.bits) : "f"(value));
  return value == value ? made : BFloat16{0x7FC0u};
#else
  const uint32_t word = bits_as<uint32_t>(value);
  const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
  return BFloat16{uint16_t((word & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded)};
#endif
}

template <class T>
struct Storage {  // float, double and integers: a plain conversion
  template <class V>
  static CONSISTENT_INLINE T store(V value) {
    return T(value);
  }
  static CONSISTENT_INLINE T load(T value) { return value; }
};
template <>
struct Storage<bool> {
  template <class V>
  static CONSISTENT_INLINE bool store(V value) {
    return value != V(0);
  }
};
template <>
struct Storage<Half> {
  template <class V>
  static CONSISTENT_INLINE Half store(V value) {
    return to_half(float(value));
  }
  static CONSISTENT_INLINE float load(Half value) { return from_half(value); }
};
template <>
struct Storage<BFloat16> {
  template <class V>
  static CONSISTENT_INLINE BFloat16 store(V value) {
    return to_bfloat16(float(value));
  }
  static CONSISTENT_INLINE float load(BFloat16 value) {
    return bits_as<float>(uint32_t(value.bits) << 16);
  }
};

// Calls run(T()) with the type of `dtype`, one of the floating types. Tests define
// CONSISTENT_FEW_TYPES where float32 and bfloat16 alone are run.
template <class Run>
CONSISTENT_HOST_INLINE void visit_float_type(Dtype dtype, const Run& run) {
  switch (dtype) {
#ifndef CONSISTENT_FEW_TYPES
    case Dtype::f64:
      return run(double());
    case Dtype::f16:
      return run(Half());
#endif
    case Dtype::bf16:
      return run(BFloat16());
    default:
      return run(float());
  }
}

template <class Run>
CONSISTENT_HOST_INLINE void visit_type(Dtype dtype, const Run& run) {
  switch (dtype) {
    case Dtype::u8:
      return run(uint8_t());
    case Dtype::i8:
      return run(int8_t());
    case Dtype::i16:
      return run(int16_t());
    case Dtype::i32:
      return run(int32_t());
    case Dtype::i64:
      return run(int64_t());
    case Dtype::boolean:
      return run(bool());
    default:
      return visit_float_type(dtype, run);
  }
}

}  // namespace consistent
