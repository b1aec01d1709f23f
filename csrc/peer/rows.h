// A box of a contiguous tensor, as rows of equal length with a constant stride, and copies between
// two boxes of the same number of bytes. So a tensor that is split along any dim is sent without a
// contiguous copy of the part.

#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <vector>

namespace consistent::peer {

struct Rows {
  char* base = nullptr;
  int64_t row = 0;     // bytes in a row
  int64_t stride = 0;  // bytes from one row to the next
  int64_t count = 0;

  int64_t bytes() const { return row * count; }
  bool joined() const { return count <= 1 || row == stride; }
};

inline Rows joined(const void* base, int64_t bytes) {
  return {static_cast<char*>(const_cast<void*>(base)), bytes, bytes, 1};
}

// Indices [start, start + size) of the middle dim of a contiguous (outer, all, inner) tensor.
inline Rows cut(void* base, int64_t outer, int64_t all, int64_t inner_bytes, int64_t start,
                int64_t size) {
  return {static_cast<char*>(base) + start * inner_bytes, size * inner_bytes, all * inner_bytes,
          outer};
}

// Copies rows of `Row` bytes. `Row` is a compile-time constant, so memcpy of a short row is
// inlined.
template <int Row>
void copy_short_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                     int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    memcpy(to, from, Row);
    to += to_stride;
    from += from_stride;
  }
}

inline void copy_rows(char* to, int64_t to_stride, const char* from, int64_t from_stride,
                      int64_t row, int64_t count) {
  switch (row) {
    case 1:
      return copy_short_rows<1>(to, to_stride, from, from_stride, count);
    case 2:
      return copy_short_rows<2>(to, to_stride, from, from_stride, count);
    case 4:
      return copy_short_rows<4>(to, to_stride, from, from_stride, count);
    case 8:
      return copy_short_rows<8>(to, to_stride, from, from_stride, count);
    case 12:
      return copy_short_rows<12>(to, to_stride, from, from_stride, count);
    case 16:
      return copy_short_rows<16>(to, to_stride, from, from_stride, count);
    case 32:
      return copy_short_rows<32>(to, to_stride, from, from_stride, count);
    case 64:
      return copy_short_rows<64>(to, to_stride, from, from_stride, count);
  }
  for (int64_t i = 0; i < count; ++i) memcpy(to + i * to_stride, from + i * from_stride, row);
}

// Copies bytes [begin, end) of a box, counted row after row, to contiguous memory.
inline void pack(char* to, const Rows& from, int64_t begin, int64_t end) {
  if (begin >= end) return;
  if (from.joined()) {
    memcpy(to, from.base + begin, end - begin);
    return;
  }
  int64_t row = begin / from.row, offset = begin % from.row;
  if (offset != 0) {  // `begin` is inside a row: the rest of that row first
    const int64_t bytes = std::min(from.row - offset, end - begin);
    memcpy(to, from.base + row * from.stride + offset, bytes);
    to += bytes, begin += bytes, ++row;
  }
  const int64_t whole = (end - begin) / from.row;
  copy_rows(to, from.row, from.base + row * from.stride, from.stride, from.row, whole);
  to += whole * from.row, begin += whole * from.row, row += whole;
  if (begin < end) memcpy(to, from.base + row * from.stride, end - begin);
}

// The reverse of pack: copies contiguous memory to bytes [begin, end) of a box.
inline void unpack(const Rows& to, int64_t begin, int64_t end, const char* from) {
  if (begin >= end) return;
  if (to.joined()) {
    memcpy(to.base + begin, from, end - begin);
    return;
  }
  int64_t row = begin / to.row, offset = begin % to.row;
  if (offset != 0) {
    const int64_t bytes = std::min(to.row - offset, end - begin);
    memcpy(to.base + row * to.stride + offset, from, bytes);
    from += bytes, begin += bytes, ++row;
  }
  const int64_t whole = (end - begin) / to.row;
  copy_rows(to.base + row * to.stride, to.stride, from, to.row, to.row, whole);
  from += whole * to.row, begin += whole * to.row, row += whole;
  if (begin < end) memcpy(to.base + row * to.stride, from, end - begin);
}

// Copies bytes [begin, end) of a box to the same bytes of another.
inline void copy(const Rows& to, const Rows& from, int64_t begin, int64_t end) {
  if (begin >= end) return;
  if (from.joined()) return unpack(to, begin, end, from.base + begin);
  if (to.joined()) return pack(to.base + begin, from, begin, end);
  alignas(64) char block[16384];  // stays in the L1 cache
  for (; begin < end; begin += int64_t(sizeof block)) {
    const int64_t stop = std::min(end, begin + int64_t(sizeof block));
    pack(block, from, begin, stop);
    unpack(to, begin, stop, block);
  }
}

// Boxes one after the other, counted as one run of bytes: the parts of several tensors in one move.
struct Chain {
  std::vector<Rows> boxes;

  Chain() = default;
  Chain(const Rows& box) : boxes{box} {}  // one box is the common case

  int64_t bytes() const {
    int64_t sum = 0;
    for (const Rows& box : boxes) sum += box.bytes();
    return sum;
  }
};

inline std::vector<Chain> chains(const std::vector<Rows>& boxes) {
  return std::vector<Chain>(boxes.begin(), boxes.end());
}

// Calls body(i, first, last, offset) for each box i that has some of bytes [begin, end) of the
// chain: bytes [first, last) of the box are bytes offset, offset + 1, ... of [begin, end).
template <typename Body>
void each_box(const Chain& chain, int64_t begin, int64_t end, Body body) {
  int64_t start = 0;
  for (size_t i = 0; i < chain.boxes.size() && start < end; ++i) {
    const int64_t bytes = chain.boxes[i].bytes();
    const int64_t first = std::max<int64_t>(begin - start, 0), last = std::min(end - start, bytes);
    if (first < last) body(i, first, last, start + first - begin);
    start += bytes;
  }
}

inline void pack(char* to, const Chain& from, int64_t begin, int64_t end) {
  each_box(from, begin, end, [&](size_t i, int64_t first, int64_t last, int64_t offset) {
    pack(to + offset, from.boxes[i], first, last);
  });
}

inline void unpack(const Chain& to, int64_t begin, int64_t end, const char* from) {
  each_box(to, begin, end, [&](size_t i, int64_t first, int64_t last, int64_t offset) {
    unpack(to.boxes[i], first, last, from + offset);
  });
}

}  // namespace consistent::peer
