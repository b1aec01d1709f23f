// Moves between the members of a group, through slots of a shared segment.
//
// Each member has two slots. In step s a member writes to its slot s % 2, meets the others (a
// barrier), and reads their slots s % 2. A member that arrives at the meeting of step s + 1 has
// read everything of step s, so after that meeting slot s % 2 may be written again. So one meeting
// per step is enough, and the next write overlaps with the others' reads. Messages longer than a
// slot take several steps. Every move is a call that all members make in the same order.

#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "header.h"
#include "meeting.h"
#include "reduce.h"
#include "rows.h"
#include "segment.h"

namespace consistent::peer {

// Whether this thread is in a call of any group. Python code sees true only if it runs in the
// middle of a call, as a signal handler does; the other members do not run it.
bool is_in_call();
// The errors that this process has met and others may not have met: Call::failures of its headers.
extern std::atomic<int64_t> failures;
// Adds to `failures` and tells the members of all groups of this process, which may be waiting for
// this process.
void add_failures(int64_t number);
// Whether this thread is composing the message for calls that do not match. Its own calls then
// leave `failures` out of their headers.
extern thread_local bool explaining;

class Group {
 public:
  static size_t segment_bytes(int members, int64_t slot_bytes);

  // `slot_bytes` is a multiple of 64 * members. `ranks` are the members' names, in order.
  Group(Segment segment, int me, std::vector<int> ranks, int64_t slot_bytes, double timeout_s,
        Callbacks callbacks = {});
  ~Group();

  // out = x op x' op ... over the members, in their order. `out` may be `x`.
  void all_reduce(const Call& call, const void* x, void* out, int64_t elements, Type type, Op op);
  // Member k combines part k of every member's x, which is their `ins[k]`, into its `outs`: one
  // output per box of `ins[k]`.
  void reduce_scatter(const Call& call, const std::vector<Chain>& ins,
                      const std::vector<void*>& outs, Type type, Op op);
  // `mine` of member k is copied to `outs[k]` of every member.
  void all_gather(const Call& call, const Chain& mine, const std::vector<Chain>& outs);
  // Returns `mine` of every member, in their order. Members need not know each other's sizes.
  std::vector<std::string> gather_objects(const std::string& mine);
  // `ins[k]` goes to member k, `outs[k]` comes from it.
  void all_to_all(const Call& call, const std::vector<Rows>& ins, const std::vector<Rows>& outs);
  // x of member `source` is copied to `out` of every member. The other members' x is not read.
  void broadcast(const Call& call, int source, const void* x, void* out, int64_t bytes);

  // Compares the calls and sizes that all members give, and moves nothing. `sent[k]` are the bytes
  // for member k, `due[k]` those expected from it.
  void check(const Call& call, const std::vector<int64_t>& sent, const std::vector<int64_t>& due);

  // Called instead of a move by a member that has no memory for it: all members throw Mismatch. If
  // steps() is no longer `steps_before`, the move has begun and cannot be undone; then all members
  // throw Broken, now and in later calls.
  [[noreturn]] void refuse(uint64_t steps_before);
  uint64_t steps() const { return meeting_.steps(); }

  // Copies x into shared memory and returns where every member's x can be read until `unstage`. No
  // other call may come between the two. Needs `room() >= bytes`.
  std::vector<void*> stage(const Call& call, const void* x, int64_t bytes);
  void unstage();
  // set_bulk() gives stage() a segment of size() * bytes bytes, mapped by all members, for an x
  // that does not fit in a slot, or takes the segment away. room(): the most bytes that stage()
  // accepts.
  int64_t room() const { return bulk_ ? bulk_bytes_ : slot_bytes_; }
  void set_bulk(std::optional<Segment> segment, int64_t bytes);
  // Removes the names of the segments. Call it after all members have mapped them.
  void unlink();

  // In an all-reduce of at most `bytes` bytes every member sends all of x to all members; a longer
  // one is a reduce-scatter and an all-gather. `narrow` is the limit for two-byte floats, which
  // cost more to add. All members must set the same limits, or they would meet different numbers of
  // times.
  void set_one_shot(int64_t bytes, int64_t narrow) {
    one_shot_bytes_ = bytes;
    one_shot_narrow_ = narrow;
  }
  // A member that sleeps in a call, the text of the call, and the step of each member.
  struct Waiting {
    Sleeper sleeper;
    std::string call;
    std::vector<uint64_t> steps;
  };
  std::optional<Waiting> waiting() const;
  void tell_failures() { meeting_.tell_failures(failures.load()); }

  int size() const { return meeting_.size(); }
  int me() const { return meeting_.me(); }
  const std::vector<int>& ranks() const { return meeting_.ranks(); }
  const std::string& name() const { return segment_.name(); }

 private:
  // Held during a call. While it is held, its thread is "in a call".
  class Lock {
   public:
    Lock() = default;
    explicit Lock(std::mutex& mutex);
    Lock(Lock&& other) = default;
    Lock& operator=(Lock&& other) = default;
    ~Lock();
    void unlock();

   private:
    std::unique_lock<std::mutex> held_;
  };

  char* slot(int member, uint64_t step) const;
  Header* header(int member, uint64_t step) const;
  // The offset of the part that `from` sends to `to`, in a slot of `from` that is divided into one
  // part for each of the other members.
  int64_t part(int from, int to) const { return part_bytes() * (to < from ? to : to - 1); }
  int64_t part_bytes() const { return slot_bytes_ / (size() - 1) / 64 * 64; }

  Lock begin(const Call& call, const std::vector<int64_t>& sent, const std::vector<int64_t>& due);
  void check_headers();
  uint64_t next_step() const { return meeting_.steps() + 1; }
  void arrive() { meeting_.arrive(); }
  void wait();
  int64_t longest_between() const;
  void one_shot(const char* x, char* out, int64_t elements, Type type, Op op);
  void two_shot(const char* x, char* out, int64_t elements, Type type, Op op);

  Segment segment_;
  Meeting meeting_;
  int64_t slot_bytes_;
  int64_t one_shot_bytes_ = 0, one_shot_narrow_ = 0;
  size_t headers_at_, slots_at_;
  std::optional<Segment> bulk_;
  int64_t bulk_bytes_ = 0;
  Call call_{};         // the call under way
  uint64_t first_ = 0;  // its first step
  std::mutex mutex_;    // one call at a time
  Lock staged_;
  // The thread that called stage(), so that another call of the same thread raises instead of
  // deadlocking. Atomic only because other threads compare it at the same time: a thread finds its
  // own id here only if it stored the id itself, so no ordering with other memory is needed.
  std::atomic<std::thread::id> stager_{};
};

}  // namespace consistent::peer
