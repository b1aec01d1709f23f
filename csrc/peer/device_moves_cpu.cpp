#include <stdexcept>

#include "device_walk.h"

namespace consistent::peer {

// The limit of 4 GB is that of the 32-bit offsets in device_walk.h.
void Boxes::add(const Rows& box) {
  if (count == kMostPeers || box.bytes() >= int64_t(1) << 32) {
    throw std::length_error("a move of more than 32 peers, or of 4 GB between two of them");
  }
  rows[count++] = box;
}

void copy_boxes_cpu(const Boxes& to, const Boxes& from) {
  visit_unit(unit_of(to, from), [&](auto bytes) {
    for (int k = 0; k < from.count; ++k) {
      const uint32_t units = uint32_t(from.rows[k].bytes() / bytes);
      for (uint32_t i = 0; i < units; ++i) copy_unit<bytes>(to.rows[k], from.rows[k], i);
    }
  });
}

void reduce_boxes_cpu(void* out, const Boxes& boxes, Type type, Op op) {
  const int64_t all = boxes.rows[0].bytes();
  const int unit = reinterpret_cast<uintptr_t>(out) % 16 == 0 ? unit_of(boxes) : 1;
  visit_reduction(type, op, unit, [&](auto number, auto count, auto kind) {
    using T = decltype(number);
    const uint32_t units = uint32_t(all / int64_t(sizeof(T) * count));
    for (uint32_t i = 0; i < units; ++i) {
      reduce_unit<T, count, kind>(static_cast<char*>(out), boxes, i);
    }
  });
}

}  // namespace consistent::peer
