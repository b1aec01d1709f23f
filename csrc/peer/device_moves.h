// Moves between a GPU and memory that it shares with its peers. Each move is one kernel launch, for
// any number of peers and any dims that are split or joined. The CPU versions access the same
// addresses as the kernels.

#pragma once

#include "reduce.h"
#include "rows.h"

namespace consistent::peer {

// Two Boxes take 2 * 1032 bytes of a kernel's parameters, which may have 4096 bytes.
constexpr int kMostPeers = 32;

// One box per peer.
struct Boxes {
  Rows rows[kMostPeers];
  int count = 0;

  void add(const Rows& box);  // throws std::length_error beyond kMostPeers or 4 GB
};

// Copies box k of `from` to box k of `to`, which has the same number of bytes, for all k. The boxes
// of `to` do not overlap. `stream` is a cudaStream_t; the CUDA version returns after the launch.
void copy_boxes_cpu(const Boxes& to, const Boxes& from);
void copy_boxes_cuda(const Boxes& to, const Boxes& from, void* stream);

// out[i] = boxes[0][i] op boxes[1][i] op ..., with the same bits as reduce() of reduce.h. `out` is
// contiguous. The boxes differ only in their base.
void reduce_boxes_cpu(void* out, const Boxes& boxes, Type type, Op op);
void reduce_boxes_cuda(void* out, const Boxes& boxes, Type type, Op op, void* stream);

}  // namespace consistent::peer
