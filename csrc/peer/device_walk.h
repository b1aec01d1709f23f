// What one thread does in the moves of device_moves.h, for host and device alike.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels/storage.h"
#include "device_moves.h"

namespace consistent::peer {

template <class T, int kCount>
struct alignas(sizeof(T) * kCount) Pack {
  T value[kCount];
};

template <class P>
CONSISTENT_INLINE P load_as(const char* from) {
#ifdef __CUDA_ARCH__
  return *reinterpret_cast<const P*>(from);  // one load: the address is aligned
#else
  P value;
  memcpy(&value, from, sizeof value);
  return value;
#endif
}

template <class P>
CONSISTENT_INLINE void store_as(char* to, const P& value) {
#ifdef __CUDA_ARCH__
  *reinterpret_cast<P*>(to) = value;
#else
  memcpy(to, &value, sizeof value);
#endif
}

// The offset from the base at which byte `at` of a box lies. In 32 bits, since their division is
// cheap.
CONSISTENT_INLINE int64_t offset_of(const Rows& box, uint32_t at) {
  const uint32_t length = uint32_t(box.row), row = at / length;
  return int64_t(row) * box.stride + (at - row * length);
}

template <int kBytes>
CONSISTENT_INLINE void copy_unit(const Rows& to, const Rows& from, uint32_t unit) {
  using P = Pack<char, kBytes>;
  const uint32_t at = unit * kBytes;
  store_as<P>(to.base + offset_of(to, at), load_as<P>(from.base + offset_of(from, at)));
}

// One step of a reduction. A NaN stays or becomes the result; sums of integers wrap around.
template <Op kOp, class W>
CONSISTENT_INLINE W folded(W a, W b) {
  if constexpr (kOp == Op::sum && std::is_integral<W>::value) {
    using U = std::make_unsigned_t<W>;
    return W(U(U(a) + U(b)));
  } else if constexpr (kOp == Op::sum) {
    return a + b;
  } else {
    const bool taken = kOp == Op::max ? b > a : b < a;
    return (taken || b != b) ? (a != a ? a : b) : a;
  }
}

template <class T, int kCount, Op kOp>
CONSISTENT_INLINE void reduce_unit(char* out, const Boxes& boxes, uint32_t unit) {
  using Wide = decltype(Storage<T>::load(T()));
  using P = Pack<T, kCount>;
  const uint32_t at = unit * uint32_t(sizeof(P));
  const int64_t offset = offset_of(boxes.rows[0], at);
  P pack = load_as<P>(boxes.rows[0].base + offset);
  Wide total[kCount];
  for (int j = 0; j < kCount; ++j) total[j] = Storage<T>::load(pack.value[j]);
  for (int k = 1; k < boxes.count; ++k) {
    pack = load_as<P>(boxes.rows[k].base + offset);
    for (int j = 0; j < kCount; ++j) {
      total[j] = folded<kOp, Wide>(total[j], Storage<T>::load(pack.value[j]));
    }
  }
  for (int j = 0; j < kCount; ++j) pack.value[j] = Storage<T>::store(total[j]);
  store_as<P>(out + at, pack);
}

// The largest number of bytes, at most 16, that divides all rows, strides and addresses.
inline int unit_of(const Boxes& boxes) {
  uint64_t bits = 16;
  for (int k = 0; k < boxes.count; ++k) {
    const Rows& box = boxes.rows[k];
    if (box.bytes() == 0) continue;
    bits |= uint64_t(box.row) | reinterpret_cast<uintptr_t>(box.base);
    if (box.count > 1) bits |= uint64_t(box.stride);
  }
  return int(bits & (~bits + 1));
}

inline int unit_of(const Boxes& a, const Boxes& b) {
  const int first = unit_of(a), second = unit_of(b);
  return first < second ? first : second;
}

template <class Run>
void visit_unit(int bytes, const Run& run) {
  switch (bytes) {
    case 16:
      return run(std::integral_constant<int, 16>());
    case 8:
      return run(std::integral_constant<int, 8>());
    case 4:
      return run(std::integral_constant<int, 4>());
    case 2:
      return run(std::integral_constant<int, 2>());
    default:
      return run(std::integral_constant<int, 1>());
  }
}

template <class Run>
void visit_number(Type type, const Run& run) {
  switch (type) {
    case Type::int8:
      return run(int8_t());
    case Type::int16:
      return run(int16_t());
    case Type::uint16:
      return run(uint16_t());
    case Type::int32:
      return run(int32_t());
    case Type::uint32:
      return run(uint32_t());
    case Type::int64:
      return run(int64_t());
    case Type::uint64:
      return run(uint64_t());
    case Type::float32:
      return run(float());
    case Type::float64:
      return run(double());
    case Type::float16:
      return run(Half());
    case Type::bfloat16:
      return run(BFloat16());
    default:  // booleans are bytes of 0 and 1
      return run(uint8_t());
  }
}

// Calls run(number, count, op) with types that fix all three at compile time; `count` is as many
// numbers as 16 bytes hold where `unit` is 16, else 1.
template <class Run>
void visit_reduction(Type type, Op op, int unit, const Run& run) {
  if (type == Type::boolean && op == Op::sum) op = Op::max;
  visit_number(type, [&](auto number) {
    constexpr int kWhole = 16 / int(sizeof number);
    const auto with = [&](auto count) {
      if (op == Op::sum) return run(number, count, std::integral_constant<Op, Op::sum>());
      if (op == Op::max) return run(number, count, std::integral_constant<Op, Op::max>());
      run(number, count, std::integral_constant<Op, Op::min>());
    };
    if (unit == 16) return with(std::integral_constant<int, kWhole>());
    with(std::integral_constant<int, 1>());
  });
}

}  // namespace consistent::peer
