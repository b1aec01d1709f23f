// g++ -std=c++17 -O1 -g -DCONSISTENT_CLONES= -fsanitize=address,undefined
//   csrc/tests/device_moves_test.cpp csrc/peer/device_moves_cpu.cpp csrc/peer/reduce.cpp
//
// Compares the CPU versions of the moves between devices with the moves between processes.

#include <cstdio>

#include "move_cases.h"

using namespace consistent::peer;

namespace {

int wrong = 0;

void try_copy(const MoveCase& it) {
  std::vector<Bytes> memory;
  std::vector<char*> from;
  for (int k = 0; k < it.peers; ++k) memory.push_back(memory_of(it, k, bytes_of(it)));
  for (Bytes& bytes : memory) from.push_back(bytes.data());
  Bytes to(size_t(part_bytes(it) * it.peers + it.skew)), wanted(to);
  Boxes taking, placing;
  boxes_of(it, from, to.data(), taking, placing);
  copy_boxes_cpu(placing, taking);
  for (int k = 0; k < it.peers; ++k) {
    const Rows box = taken(it, from[size_t(k)]);
    copy(placed(it, wanted.data(), k), box, 0, box.bytes());
  }
  wrong += to != wanted;
}

void try_reduce(const MoveCase& it, Type type, Op op) {
  if (it.inner % size_of(type) != 0 || it.skew % size_of(type) != 0) return;
  std::vector<Bytes> memory, packed;
  Boxes boxes;
  std::vector<const void*> pieces;
  for (int k = 0; k < it.peers; ++k) memory.push_back(memory_of(it, k, bytes_of(it)));
  for (Bytes& bytes : memory) {
    boxes.add(taken(it, bytes.data()));
    packed.emplace_back(size_t(part_bytes(it)));
    pack(packed.back().data(), taken(it, bytes.data()), 0, part_bytes(it));
  }
  for (Bytes& bytes : packed) pieces.push_back(bytes.data());
  Bytes out(size_t(part_bytes(it))), wanted(out);
  reduce_boxes_cpu(out.data(), boxes, type, op);
  reduce(wanted.data(), pieces.data(), it.peers, part_bytes(it) / size_of(type), type, op);
  wrong += out != wanted;
}

}  // namespace

int main() {
  for (const MoveCase& it : move_cases()) {
    try_copy(it);
    for (const Type type : kTypes) {
      for (const Op op : {Op::sum, Op::max, Op::min}) try_reduce(it, type, op);
    }
  }
  printf(wrong ? "%d are wrong\n" : "every move is right\n", wrong);
  return wrong != 0;
}
