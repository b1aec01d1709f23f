// Loads and stores of 16 bytes. A run of elements is processed as a scalar head up to the first
// aligned address, then packs of 16 bytes, then a scalar tail.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "storage.h"

namespace consistent {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

template <class T>
constexpr int kPackOf = 16 / int(sizeof(T));

template <class T>
using PackOf = Pack<T, kPackOf<T>>;

// The type by which a thread moves kBytes bytes in one instruction; uint4 for 16 and more.
template <int kBytes>
struct UnitOf {
  using type = uint4;
};
template <>
struct UnitOf<8> {
  using type = uint64_t;
};
template <>
struct UnitOf<4> {
  using type = uint32_t;
};
template <>
struct UnitOf<2> {
  using type = uint16_t;
};
template <>
struct UnitOf<1> {
  using type = uint8_t;
};

// A pack as it is loaded. A variable that is loaded only under a condition should have this type:
// nvcc keeps the two-byte numbers of a Pack apart, and where two paths meet it would wait for the
// load to take them apart. The memcpy between registers avoids aliasing T through the unit's type
// and costs no instruction.
template <class P>
struct Loaded {
  using Unit = typename UnitOf<int(sizeof(P))>::type;
  static constexpr int kUnits = int(sizeof(P) / sizeof(Unit));
  Unit units[kUnits];
  __device__ __forceinline__ P pack() const {
    P made;
    memcpy(&made, units, sizeof(made));
    return made;
  }
};

// `from` must be aligned to the pack's size, or to 16 bytes for a larger pack.
template <class P>
__device__ __forceinline__ Loaded<P> load(const void* from) {
  using Unit = typename Loaded<P>::Unit;
  Loaded<P> made;
#pragma unroll
  for (int i = 0; i < Loaded<P>::kUnits; ++i) made.units[i] = static_cast<const Unit*>(from)[i];
  return made;
}

template <class P>
__device__ __forceinline__ P load_pack(const void* from) {
  return load<P>(from).pack();
}

// nvcc splits the assignment of a uint4 and does not always merge the stores of its four words
// again. The intrinsic is one instruction.
template <class Unit>
__device__ __forceinline__ void store_unit(Unit* to, const Unit& unit) {
#ifdef __CUDACC__
  if constexpr (sizeof(Unit) == 16) return __stwb(to, unit);
#endif
  *to = unit;
}

template <class P>
__device__ __forceinline__ void store_pack(void* to, const P& pack) {
  using Unit = typename UnitOf<int(sizeof(P))>::type;
  constexpr int kUnits = int(sizeof(P) / sizeof(Unit));
  Unit units[kUnits];
  memcpy(units, &pack, sizeof(pack));
#pragma unroll
  for (int i = 0; i < kUnits; ++i) store_unit(static_cast<Unit*>(to) + i, units[i]);
}

#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// Two numbers, neither of them a NaN, rounded by one instruction. PTX puts the first source operand
// into the upper half.
template <class T>
__device__ __forceinline__ uint32_t two_rounded(float low, float high) {
  uint32_t made;
  if constexpr (std::is_same<T, Half>::value) {
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
  } else {
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(made) : "f"(high), "f"(low));
  }
  return made;
}
#endif

// The numbers of a pack. A word holds two bf16: a shift makes a float of the lower one and a mask
// of the upper one. Taken out of the word as 16 bits, the upper one would need two instructions.
template <class T, int kCount>
__device__ __forceinline__ Pack<Real<T>, kCount> widened(const Pack<T, kCount>& from) {
  Pack<Real<T>, kCount> made;
  if constexpr (std::is_same<T, BFloat16>::value && kCount % 2 == 0) {
    uint32_t words[kCount / 2];
    memcpy(words, &from, sizeof(words));
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) {
      made.value[2 * i] = bits_as<float>(words[i] << 16);
      made.value[2 * i + 1] = bits_as<float>(words[i] & 0xFFFF0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) made.value[i] = Storage<T>::load(from.value[i]);
  }
  return made;
}

// Whether a sum of the values is a number: false if one is a NaN, or if infinities of both signs
// meet. Additions have twice the throughput of comparisons.
template <int kCount>
__device__ __forceinline__ bool sum_is_number(const float (&from)[kCount]) {
  float sums[kCount];
#pragma unroll
  for (int i = 0; i < kCount; ++i) sums[i] = from[i];
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0] == sums[0];
}

// The values rounded to T. From sm_80 on, two at a time, unless one may be a NaN: the instruction
// gives other NaN bits than Storage<T>::store.
template <class T, int kCount, class V>
__device__ __forceinline__ Pack<T, kCount> rounded(const V (&from)[kCount]) {
  Pack<T, kCount> pack;
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kIsNarrow = std::is_same<T, Half>::value || std::is_same<T, BFloat16>::value;
  if constexpr (kIsNarrow && std::is_same<V, float>::value && kCount % 2 == 0) {
    if (sum_is_number(from)) {
      uint32_t words[kCount / 2];
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) {
        words[i] = two_rounded<T>(from[2 * i], from[2 * i + 1]);
      }
      memcpy(&pack, words, sizeof(pack));
      return pack;
    }
  }
#endif
#pragma unroll
  for (int i = 0; i < kCount; ++i) pack.value[i] = Storage<T>::store(from[i]);
  return pack;
}

// Whether a pack of kBytes bytes may be loaded or stored at this address.
template <int kBytes>
__host__ __device__ __forceinline__ bool aligned_to(const void* x) {
  return reinterpret_cast<uintptr_t>(x) % (kBytes < 16 ? kBytes : 16) == 0;
}

// Elements before the first 16-byte boundary at or after `x`, at most n.
template <class T>
__device__ __forceinline__ int64_t head_of(const T* x, int64_t n) {
  const int64_t odd = int64_t(reinterpret_cast<uintptr_t>(x) % 16 / sizeof(T));
  const int64_t head = odd == 0 ? 0 : kPackOf<T> - odd;
  return head < n ? head : n;
}

// Whether one scalar head brings both addresses to a 16-byte boundary.
template <class T>
__device__ __forceinline__ bool aligned_alike(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace consistent
