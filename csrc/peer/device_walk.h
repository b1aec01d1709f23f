// The work of one thread in the moves of device_moves.h, compiled for both host and device.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "../kernels/storage.h"
#include "../kernels/units.h"
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

// The offset from the base of byte `at` of a box, counted row after row. The division is in 32
// bits, which a GPU does several times faster than in 64; Boxes::add keeps `at` below 2^32.
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

// One step of a reduction. If a or b is NaN, so is the result. Sums of integers wrap around (they
// are added as unsigned numbers, since signed overflow is undefined).
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

// Folds boxes [first, first + kPeers) into `total`, in order. All loads are issued before the first
// addition: a load from a peer takes one or two microseconds, and so these times overlap.
template <class T, int kCount, Op kOp, int kPeers, class Wide>
CONSISTENT_INLINE void fold_boxes(Wide (&total)[kCount], const Boxes& boxes, int first,
                                  int64_t offset) {
  Pack<T, kCount> packs[kPeers];
  for (int k = 0; k < kPeers; ++k) {
    packs[k] = load_as<Pack<T, kCount>>(boxes.rows[first + k].base + offset);
  }
  for (int k = 0; k < kPeers; ++k) {
    for (int j = 0; j < kCount; ++j) {
      const Wide next = Storage<T>::load(packs[k].value[j]);
      total[j] = k == 0 && first == 0 ? next : folded<kOp, Wide>(total[j], next);
    }
  }
}

template <class T, int kCount, Op kOp>
CONSISTENT_INLINE void reduce_unit(char* out, const Boxes& boxes, uint32_t unit) {
  using Wide = decltype(Storage<T>::load(T()));
  const uint32_t at = unit * uint32_t(sizeof(Pack<T, kCount>));
  const int64_t offset = offset_of(boxes.rows[0], at);
  Wide total[kCount] = {};
  int k = 0;
  for (; boxes.count - k >= 8; k += 8) fold_boxes<T, kCount, kOp, 8>(total, boxes, k, offset);
  if (boxes.count - k >= 4) fold_boxes<T, kCount, kOp, 4>(total, boxes, k, offset), k += 4;
  if (boxes.count - k >= 2) fold_boxes<T, kCount, kOp, 2>(total, boxes, k, offset), k += 2;
  if (boxes.count - k >= 1) fold_boxes<T, kCount, kOp, 1>(total, boxes, k, offset);
  Pack<T, kCount> made;
  for (int j = 0; j < kCount; ++j) made.value[j] = Storage<T>::store(total[j]);
  store_as(out + at, made);
}

// The largest number of bytes, at most 16, that divides all row lengths, strides and addresses.
inline int unit_of(const Boxes& boxes) {
  uint64_t joined = 0;
  for (int k = 0; k < boxes.count; ++k) {
    const Rows& box = boxes.rows[k];
    if (box.bytes() == 0) continue;
    joined |= uint64_t(box.row) | reinterpret_cast<uintptr_t>(box.base);
    if (box.count > 1) joined |= uint64_t(box.stride);
  }
  return unit_dividing(joined);
}

inline int unit_of(const Boxes& a, const Boxes& b) {
  const int first = unit_of(a), second = unit_of(b);
  return first < second ? first : second;
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

// Calls run(number, count, op) with arguments whose types fix all three at compile time. `count` is
// the number of elements in 16 bytes if `unit` is 16, else 1.
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
