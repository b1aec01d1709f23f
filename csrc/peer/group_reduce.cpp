// The moves of a Group that combine numbers: reduce-scatter and all-reduce.

#include <algorithm>
#include <cstring>
#include <vector>

#include "group.h"

namespace consistent::peer {
namespace {

constexpr int64_t kBlock = 16384;  // bytes combined at once, so that they stay in the L1 cache

// Combines bytes [begin, end) of the members' parts into `out`. The parts of the other members lie
// contiguously in shared memory: shared[k] points to byte `begin` of member k's part. This member's
// own part is read from its tensor, `own`.
void combine(char* out, const std::vector<const char*>& shared, int me, const Rows& own,
             int64_t begin, int64_t end, Type type, Op op) {
  alignas(64) char packed[kBlock];
  std::vector<const void*> pieces(shared.size());
  for (int64_t at = begin; at < end; at += kBlock) {
    const int64_t stop = std::min(end, at + kBlock);
    for (size_t k = 0; k < shared.size(); ++k) pieces[k] = shared[k] + (at - begin);
    pieces[me] = own.base + at;
    if (!own.joined()) {
      pack(packed, own, at, stop);
      pieces[me] = packed;
    }
    reduce(out + at, pieces.data(), int(pieces.size()), (stop - at) / size_of(type), type, op);
  }
}

}  // namespace

void Group::reduce_scatter(const Call& call, const std::vector<Chain>& ins,
                           const std::vector<void*>& outs, Type type, Op op) {
  const Chain& own = ins[me()];
  std::vector<int64_t> sent;
  for (const Chain& in : ins) sent.push_back(in.bytes());
  const Lock lock = begin(call, sent, std::vector<int64_t>(size(), own.bytes()));
  std::vector<const char*> shared(size()), places(size());
  int64_t count = 1;
  for (int64_t r = 0; r < count; ++r) {
    const uint64_t step = next_step();
    const int64_t begin = r * part_bytes(), end = begin + part_bytes();
    for (int k = 0; k < size(); ++k) {
      if (k == me()) continue;
      pack(slot(me(), step) + part(me(), k), ins[k], begin, std::min(end, ins[k].bytes()));
      places[k] = slot(k, step) + part(k, me());
    }
    arrive();
    wait();  // without it the others' parts are added before they are written
    if (r == 0) count = (std::max<int64_t>(1, longest_between()) + part_bytes() - 1) / part_bytes();
    each_box(own, begin, end, [&](size_t i, int64_t first, int64_t last, int64_t offset) {
      for (int k = 0; k < size(); ++k) {
        if (k != me()) shared[k] = places[k] + offset;
      }
      combine(static_cast<char*>(outs[i]), shared, me(), own.boxes[i], first, last, type, op);
    });
  }
}

void Group::all_reduce(const Call& call, const void* x, void* out, int64_t elements, Type type,
                       Op op) {
  const int64_t bytes = elements * size_of(type);
  const Lock lock =
      begin(call, std::vector<int64_t>(size(), bytes), std::vector<int64_t>(size(), bytes));
  const char* from = static_cast<const char*>(x);
  char* to = static_cast<char*>(out);
  const bool narrow = type == Type::float16 || type == Type::bfloat16;
  if (bytes <= (narrow ? one_shot_narrow_ : one_shot_bytes_)) {
    one_shot(from, to, elements, type, op);
  } else {
    two_shot(from, to, elements, type, op);
  }
}

// Every member sends all of x to all others, and each member combines all of it.
void Group::one_shot(const char* x, char* out, int64_t elements, Type type, Op op) {
  const int64_t bytes = elements * size_of(type);
  std::vector<const char*> shared(size());
  for (int64_t begin = 0; begin == 0 || begin < bytes; begin += slot_bytes_) {
    const uint64_t step = next_step();
    const int64_t end = std::min(begin + slot_bytes_, bytes);
    pack(slot(me(), step), joined(x, bytes), begin, end);
    for (int k = 0; k < size(); ++k) shared[k] = slot(k, step);
    arrive();
    wait();  // without it the others' slots are added before they are written
    if (begin < end) combine(out, shared, me(), joined(x, bytes), begin, end, type, op);
  }
}

// Each chunk of x is divided into one part per member. In round r a member sends the others their
// parts of chunk r, together with the sum of its own part of chunk r - 1, which it computes from
// the parts that it received in the round before:
//
//   round        0            1            2
//   sends   parts of 0   parts of 1   parts of 2 ...
//                        sum in 0     sum in 1
void Group::two_shot(const char* x, char* out, int64_t elements, Type type, Op op) {
  const int64_t bytes = elements * size_of(type);
  const int64_t most = slot_bytes_ / size() / 64 * 64;  // bytes of a part
  const int64_t chunk = most * size(), count = (bytes + chunk - 1) / chunk;
  const int64_t sums_at = most * (size() - 1);
  // Part k of chunk r is x[start(r, k) : start(r, k + 1)].
  const auto start = [&](int64_t r, int k) {
    const int64_t begin = r * chunk, length = std::min(chunk, bytes - begin);
    const int64_t each = ((length + size() - 1) / size() + 63) / 64 * 64;
    return begin + std::min(length, each * k);
  };
  const auto place = [&](int from, int to) { return most * (to < from ? to : to - 1); };
  std::vector<const char*> shared(size());
  for (int64_t r = 0; r <= count; ++r) {
    const uint64_t step = next_step();
    for (int k = 0; k < size() && r < count; ++k) {
      const int64_t begin = start(r, k), size = start(r, k + 1) - begin;
      if (k != me() && size > 0) memcpy(slot(me(), step) + place(me(), k), x + begin, size);
    }
    if (r > 0) {
      const int64_t begin = start(r - 1, me()), end = start(r - 1, me() + 1);
      for (int k = 0; k < size(); ++k) {
        if (k != me()) shared[k] = slot(k, step - 1) + place(k, me());
      }
      combine(out, shared, me(), joined(x, bytes), begin, end, type, op);
      if (begin < end) memcpy(slot(me(), step) + sums_at, out + begin, end - begin);
    }
    // Without this meeting the others' sums, and in the next round their parts, would be read
    // before they are written. After it, all members have read the slots of step - 1 (above), which
    // the next round overwrites.
    arrive();
    wait();
    for (int k = 0; k < size() && r > 0; ++k) {
      const int64_t begin = start(r - 1, k), size = start(r - 1, k + 1) - begin;
      if (k != me() && size > 0) memcpy(out + begin, slot(k, step) + sums_at, size);
    }
  }
}

}  // namespace consistent::peer
