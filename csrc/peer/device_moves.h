// What a GPU does with memory that it shares with its peers: one kernel a move, whatever the number
// of peers and the dims that are cut or joined. The forms on the CPU walk as the kernels do.

#pragma once

#include "reduce.h"
#include "rows.h"

namespace consistent::peer {

constexpr int kMostPeers = 32;  // what a kernel is given has to fit in 4 KB

// One box for each peer.
struct Boxes {
  Rows rows[kMostPeers];
  int count = 0;

  void add(const Rows& box);  // throws std::length_error beyond kMostPeers or 4 GB
};

// Box k of `to` becomes box k of `from`, which has as many bytes.
void copy_boxes_cpu(const Boxes& to, const Boxes& from);
void copy_boxes_cuda(const Boxes& to, const Boxes& from, void* stream);

// Element i of `out`, which has no gaps, becomes that of box 0 op that of box 1 op ...; the boxes
// differ in their base only. The bits of reduce().
void reduce_boxes_cpu(void* out, const Boxes& boxes, Type type, Op op);
void reduce_boxes_cuda(void* out, const Boxes& boxes, Type type, Op op, void* stream);

}  // namespace consistent::peer
