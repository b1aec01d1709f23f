// What a GPU does with memory that it shares with its peers: one kernel for each move, whatever the
// number of peers and whichever dims are cut or joined. The CPU versions visit the same addresses
// as the kernels.

#pragma once

#include "reduce.h"
#include "rows.h"

namespace consistent::peer {

// Two Boxes are 2 * 1032 of the 4096 bytes that a kernel's parameters may have.
constexpr int kMostPeers = 32;

// One box for each peer.
struct Boxes {
  Rows rows[kMostPeers];
  int count = 0;

  void add(const Rows& box);  // throws std::length_error beyond kMostPeers or 4 GB
};

// Copies box k of `from` to box k of `to`, which has as many bytes, for all k. The boxes of `to` do
// not overlap. `stream` is a cudaStream_t; the call returns when the kernel is launched.
void copy_boxes_cpu(const Boxes& to, const Boxes& from);
void copy_boxes_cuda(const Boxes& to, const Boxes& from, void* stream);

// out[i] = boxes[0][i] op boxes[1][i] op ..., with the same bits as reduce(). `out` is contiguous;
// the boxes differ in their base only.
void reduce_boxes_cpu(void* out, const Boxes& boxes, Type type, Op op);
void reduce_boxes_cuda(void* out, const Boxes& boxes, Type type, Op op, void* stream);

}  // namespace consistent::peer
