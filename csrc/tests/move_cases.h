// The cases of the moves of peer/device_moves.h for the programs in this folder: boxes in the
// memory of some peers, aligned and not, and the results they must give.

#pragma once

#include <cstring>
#include <vector>

#include "../peer/device_moves.h"

namespace consistent::peer {

using Bytes = std::vector<char>;

// Each of several peers has a tensor of (outer, whole, inner bytes). Its part (outer, size, inner)
// from `start` on is joined with those of the others, along the same or the next dim.
struct MoveCase {
  int peers;
  int64_t outer, whole, inner, start, size;
  int64_t skew;  // bytes by which all memory is off its alignment
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
        cases.push_back({peers, 64, 256, inner, 128, 128, skew});
      }
    }
  }
  return cases;
}

inline Bytes memory_of(const MoveCase& it, int peer, int64_t bytes) {
  Bytes memory(size_t(bytes + it.skew));
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = char((i * 7 + size_t(peer) * 31) % 61);
  return memory;
}

inline int64_t bytes_of(const MoveCase& it) { return it.outer * it.whole * it.inner; }
inline int64_t part_bytes(const MoveCase& it) { return it.outer * it.size * it.inner; }

inline Rows taken(const MoveCase& it, char* memory) {
  return cut(memory + it.skew, it.outer, it.whole, it.inner, it.start, it.size);
}

// The size of each peer's part, if the parts are joined along the dim that was cut.
inline Rows placed(const MoveCase& it, char* memory, int peer) {
  return cut(memory + it.skew, it.outer, it.size * it.peers, it.inner, it.size * peer, it.size);
}

// The boxes of a case: `from[k]` is in the memory of peer k, and all go to `to`.
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
