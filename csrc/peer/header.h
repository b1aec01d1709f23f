// The header that each member writes before its data: the call that it makes, and the bytes that it
// sends and expects. All members compare all headers before they read data, so all find the same
// mismatch.

#pragma once

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace consistent::peer {

enum class Kind : int32_t {
  all_reduce,
  reduce_scatter,
  all_gather,
  all_to_all,
  broadcast,
  exchange,
  objects,
  peers,
  reduce_scatter_several,
  all_gather_several,
};

constexpr int kMaxDims = 12;  // dims of a shape in a header; further dims are not compared
constexpr int64_t kUnknown = -1;

// A call, as one member makes it. It lies in shared memory: plain data, no pointers.
struct Call {
  Kind kind;
  int32_t op = -1;      // how a reduction combines: an Op
  int32_t source = -1;  // the member that a broadcast sends from
  int32_t dim = -1;     // the dim that is joined or split
  int32_t split = -1;   // the dim that an all-to-all splits
  int32_t free = -1;    // the dim whose size may differ between members
  int32_t ndim = -1;    // -1: the shapes are not compared
  char dtype[20] = {};
  int64_t shape[kMaxDims] = {};
  int32_t several = -1;  // the number of tensors in a call on several tensors
  uint64_t hash = 0;     // of these tensors' dims and sizes, as far as all members know them
  // How many errors this member has met that others may not have met; kUnknown is not compared.
  int64_t failures = kUnknown;
  bool lacks_memory = false;  // this member has no memory for the call that the others make

  std::string text() const;  // for example: all_gather of float32[2, 3] along dim 0
};

struct Header {
  Call call;
  int64_t sizes[];  // bytes to each member, then bytes expected from each (or kUnknown)

  static size_t bytes(int members);
};

struct Mismatch : std::runtime_error {
  using runtime_error::runtime_error;
};

// Throws Mismatch if members make different calls, if a member has no memory for its call, or if a
// member expects another number of bytes than another one sends it. The checks run in the same
// order on every member, so that all throw the same message.
void compare(const std::vector<const Header*>& headers, const std::vector<int>& ranks);

}  // namespace consistent::peer
