// 16 bytes at a time: a run of elements is read as a scalar head up to the first aligned address,
// packs, and a scalar tail.

#pragma once

#include <cstdint>

namespace consistent {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

template <class T>
constexpr int kPackOf = 16 / int(sizeof(T));

template <class T>
using PackOf = Pack<T, kPackOf<T>>;

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
