// The test cases for the moves of peer/device_moves.h: boxes in the memory of several peers,
// aligned and unaligned.

#pragma once

#include <algorithm>
#include <cstring>
#include <vector>

#include "../peer/device_moves.h"

namespace consistent::peer {

using Bytes = std::vector<char>;

// Each peer has a tensor of shape (outer, whole, inner bytes). Its part (outer, size, inner), which
// begins at `start`, is joined with the parts of the other peers, along the same or the next dim.
struct MoveCase {
  int peers;
  int64_t outer, whole, inner, start, size;
  int64_t skew;  // bytes between an aligned address and each box
};

inline std::vector<MoveCase> move_cases() {
  std::vector<MoveCase> cases;
  for (const int peers : {1, 2, 5}) {
    for (const int64_t inner : {1, 2, 8, 12, 16, 48}) {
      for (const int64_t skew : {0, 4, 16}) {
        if (inner % 4 != 0 && skew == 4) continue;  // elements are always aligned to their own size
        cases.push_back({peers, 1, 40, inner, 0, 40, skew});
        cases.push_back({peers, 7, 33, inner, 5, 9, skew});
        cases.push_back({peers, 3, 16, inner, 16, 0, skew});
        cases.push_back({peers, 16, 96, inner, 30, 40, skew});
      }
    }
  }
  for (const int peers : {3, 4, 6, 7, 8, 32}) {
    cases.push_back({peers, 5, 33, 16, 7, 9, 0});
    cases.push_back({peers, 5, 33, 8, 7, 9, 8});
  }
  return cases;
}

inline Bytes memory_of(const MoveCase& it, int peer, int64_t bytes) {
  Bytes memory(size_t(bytes + it.skew));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = char((i * 7 + size_t(peer) * 31) % 61);
  return memory;
}

// The upper 16 bits of a floating type's infinity; 0 for other types.
inline unsigned infinity_of(Type type) {
  switch (type) {
    case Type::float64:
      return 0x7FF0;
    case Type::float16:
      return 0x7C00;
    case Type::float32:
    case Type::bfloat16:
      return 0x7F80;
    default:
      return 0;
  }
}

// Puts infinities and NaN of a floating type in some places after the first `skew` bytes.
inline void plant_specials(Bytes& memory, int64_t skew, Type type) {
  const size_t size = size_t(size_of(type)), count = (memory.size() - size_t(skew)) / size;
  for (size_t i = 0; i < std::min<size_t>(count / 3, 20); ++i) {
    char* const to = memory.data() + skew + (i * 7919 + 2) % count * size;
    const uint16_t upper = uint16_t(infinity_of(type) | i % 2 << 15 | unsigned(i % 3 == 0));
    memset(to, 0, size);
    memcpy(to + size - 2, &upper, 2);
  }
}

inline bool is_nan(const char* element, Type type) {
  const int size = size_of(type);
  uint64_t bits = 0;
  memcpy(&bits, element, size_t(size));
  const uint64_t sign = uint64_t(1) << (8 * size - 1);
  return infinity_of(type) != 0 && (bits & ~sign) > uint64_t(infinity_of(type)) << (8 * size - 16);
}

// Whether the bytes are equal except for the bits of NaN, which differ on CUDA.
inline bool alike(const Bytes& a, const Bytes& b, Type type) {
  const size_t size = size_t(size_of(type));
  for (size_t at = 0; at + size <= a.size(); at += size) {
    const bool same = memcmp(a.data() + at, b.data() + at, size) == 0;
    if (!same && !(is_nan(a.data() + at, type) && is_nan(b.data() + at, type))) return false;
  }
  return a.size() == b.size();
}

inline int64_t bytes_of(const MoveCase& it) { return it.outer * it.whole * it.inner; }
inline int64_t part_bytes(const MoveCase& it) { return it.outer * it.size * it.inner; }

inline Rows taken(const MoveCase& it, char* memory) {
  return cut(memory + it.skew, it.outer, it.whole, it.inner, it.start, it.size);
}

// The size of each peer's part, if the parts are joined along the dim that was split.
inline Rows placed(const MoveCase& it, char* memory, int peer) {
  return cut(memory + it.skew, it.outer, it.size * it.peers, it.inner, it.size * peer, it.size);
}

// The boxes of a case: `from[k]` is the memory of peer k, and all parts go to `to`.
inline void boxes_of(const MoveCase& it, const std::vector<char*>& from, char* to, Boxes& taking,
                     Boxes& placing) {
  for (int k = 0; k < it.peers; ++k) {
    taking.add(taken(it, from[size_t(k)]));
    placing.add(placed(it, to, k));
  }
}

constexpr Type kTypes[] = {Type::int8,    Type::uint8,   Type::int16,   Type::uint16,
                           Type::int32,   Type::uint32,  Type::int64,   Type::uint64,
                           Type::float32, Type::float64, Type::float16, Type::bfloat16};

}  // namespace consistent::peer
