// 16 bytes at a time: a run of elements is read as a scalar head up to the first aligned address,
// packs, and a scalar tail.

#pragma once

#include <cuda_runtime.h>

#include <cstdint>
#include <cstring>

namespace consistent {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

template <class T>
constexpr int kPackOf = 16 / int(sizeof(T));

template <class T>
using PackOf = Pack<T, kPackOf<T>>;

// The type by which a thread moves `kBytes` bytes.
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

// `from` is aligned to the pack's size, or to 16 bytes if that is less.
template <class P>
__device__ __forceinline__ P load_pack(const void* from) {
  using Unit = typename UnitOf<int(sizeof(P))>::type;
  constexpr int kUnits = int(sizeof(P) / sizeof(Unit));
  Unit units[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) units[i] = static_cast<const Unit*>(from)[i];
  P pack;
  memcpy(&pack, units, sizeof(pack));
  return pack;
}

// nvcc takes the assignment of a uint4 apart, and does not always join the stores of its four words
// again; the intrinsic is one instruction.
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

// Whether a pack of `kBytes` bytes may be moved at this address.
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

template <class T>
__device__ __forceinline__ bool aligned_alike(const void* a, const void* b) {
  return (reinterpret_cast<uintptr_t>(a) - reinterpret_cast<uintptr_t>(b)) % 16 == 0;
}

}  // namespace consistent
