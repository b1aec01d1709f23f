#include "header.h"

#include <algorithm>
#include <cstring>

#include "alarm.h"

namespace consistent::peer {
namespace {

const char* const kNames[] = {
    "all_reduce", "reduce_scatter", "all_gather", "all_to_all",     "broadcast",
    "exchange",   "gather_objects", "peers",      "reduce_scatter", "all_gather",
};
const char* const kOps[] = {"sum", "max", "min"};

std::string rank(int r) { return "rank " + std::to_string(r); }

bool same(const Call& a, const Call& b) {
  const bool fixed = a.kind == b.kind && a.op == b.op && a.source == b.source && a.dim == b.dim &&
                     a.split == b.split && a.ndim == b.ndim && a.several == b.several &&
                     a.hash == b.hash && strncmp(a.dtype, b.dtype, sizeof a.dtype) == 0;
  if (!fixed) return false;
  for (int d = 0; d < std::min(a.ndim, kMaxDims); ++d) {
    if (d != a.free && a.shape[d] != b.shape[d]) return false;
  }
  return true;
}

[[noreturn]] void fail_calls(const Header& a, const Header& b, int rank_a, int rank_b) {
  throw Mismatch(
      rank(rank_a) + " calls " + a.call.text() + " while " + rank(rank_b) + " calls " +
      b.call.text() +
      ".\n  Ranks of one group must make the same calls in the same order, with shapes that fit.\n"
      "  Look for a branch that only some of the ranks take.");
}

[[noreturn]] void fail_step(const Header& a, const Header& b, int rank_a, int rank_b) {
  const bool first = a.call.failures > b.call.failures;
  throw Mismatch(other_step(rank(first ? rank_a : rank_b), rank(first ? rank_b : rank_a)) +
                 ", so they are not at the same step of the program.\n"
                 "  What they would send each other belongs to different steps, now and later.\n"
                 "  Let the job end, and start it again from its last checkpoint.\n"
                 "  To stop by Ctrl-C at the same step on all ranks: "
                 "consistent.checkpoint.on_signal(signal.SIGINT).");
}

[[noreturn]] void fail_memory(const std::vector<const Header*>& headers,
                              const std::vector<int>& ranks) {
  std::string lacking, call;
  for (size_t k = 0; k < headers.size(); ++k) {
    if (!headers[k]->call.lacks_memory) {
      call = headers[k]->call.text();
      continue;
    }
    lacking += (lacking.empty() ? "" : ", ") + rank(ranks[k]);
  }
  throw Mismatch(lacking + " got no memory for " + (call.empty() ? "its part of a call" : call) +
                 ", and every rank raises this.\n"
                 "  Nothing was moved, and all ranks are at the same step of the program.\n"
                 "  Free memory there, or let each rank hold less: split more, or take a smaller "
                 "batch.");
}

[[noreturn]] void fail_sizes(const Header& from, const Header& to, int sender, int receiver,
                             int64_t sent, int64_t expected) {
  throw Mismatch(rank(sender) + " sends " + std::to_string(sent) + " bytes to " + rank(receiver) +
                 " in " + from.call.text() + ", and " + rank(receiver) + " expects " +
                 std::to_string(expected) + " in " + to.call.text() +
                 ".\n  Nothing was moved.\n  Pass the sizes that the sending rank's piece has.");
}

}  // namespace

std::string Call::text() const {
  std::string text = kNames[int(kind)];
  if (op >= 0) text += std::string("(") + kOps[op] + ")";
  if (dtype[0] != 0) text += std::string(" of ") + dtype;
  if (several >= 0) {
    text += ", " + std::to_string(several) + " tensors whose sizes have the hash " +
            std::to_string(hash);
  }
  if (ndim >= 0) {
    text += "[";
    for (int d = 0; d < std::min(ndim, kMaxDims); ++d) {
      text += (d ? ", " : "") + std::to_string(shape[d]);
    }
    text += ndim > kMaxDims ? ", ...]" : "]";
  }
  if (split >= 0) text += " cut along dim " + std::to_string(split);
  if (dim >= 0)
    text += (split >= 0 ? " and joined along dim " : " along dim ") + std::to_string(dim);
  if (source >= 0) text += " from rank " + std::to_string(source);
  return text;
}

// Rounded up to a cache line, so that two members never write to the same one.
size_t Header::bytes(int members) {
  const size_t all = sizeof(Header) + 2 * sizeof(int64_t) * size_t(members);
  return (all + 63) / 64 * 64;
}

void compare(const std::vector<const Header*>& headers, const std::vector<int>& ranks) {
  const int n = int(ranks.size());
  for (int k = 1; k < n; ++k) {
    const int64_t first = headers[0]->call.failures, other = headers[k]->call.failures;
    if (first != kUnknown && other != kUnknown && first != other) {
      fail_step(*headers[0], *headers[k], ranks[0], ranks[k]);
    }
  }
  for (const Header* each : headers) {
    if (each->call.lacks_memory) fail_memory(headers, ranks);
  }
  for (int k = 1; k < n; ++k) {
    if (!same(headers[0]->call, headers[k]->call)) {
      fail_calls(*headers[0], *headers[k], ranks[0], ranks[k]);
    }
  }
  for (int from = 0; from < n; ++from) {
    for (int to = 0; to < n; ++to) {
      const int64_t sent = headers[from]->sizes[to], expected = headers[to]->sizes[n + from];
      if (expected == kUnknown || sent == expected) continue;
      fail_sizes(*headers[from], *headers[to], ranks[from], ranks[to], sent, expected);
    }
  }
}

}  // namespace consistent::peer
