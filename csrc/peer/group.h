// Moves between the members of a group, through slots of a shared segment.
//
// Each member has two slots. In step s it writes to slot s % 2, meets the others, and reads theirs.
// A member that arrives at step s + 1 has read everything of step s, so after that meeting slot
// s % 2 may be written again. So one meeting a step is enough, and the next write overlaps with the
// others' reading. Messages longer than a slot take several steps. Every move is a call that all
// members make in the same order.

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

// Whether this thread is in a call of any group: then Python code runs in the middle of it, such as
// a signal's handler, and the other members are not there.
bool is_in_call();
// What headers say of this process (Call::failures). A member that explains why calls do not fit
// leaves it out.
extern std::atomic<int64_t> failures;
// Adds to them, and tells the members of all groups of this process, who may wait for it.
void add_failures(int64_t number);
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
  // Member k combines part k of every member's x, their `ins[k]`, into its `outs`, one for each box
  // of `ins[k]`.
  void reduce_scatter(const Call& call, const std::vector<Chain>& ins,
                      const std::vector<void*>& outs, Type type, Op op);
  // The `mine` of member k goes to `outs[k]` of every member.
  void all_gather(const Call& call, const Chain& mine, const std::vector<Chain>& outs);
  // The `mine` of every member, in their order. Members need not know each other's sizes.
  std::vector<std::string> gather_objects(const std::string& mine);
  // `ins[k]` goes to member k, `outs[k]` comes from it.
  void all_to_all(const Call& call, const std::vector<Rows>& ins, const std::vector<Rows>& outs);
  // The x of member `source` goes to the `out` of all. Only that member reads its x.
  void broadcast(const Call& call, int source, const void* x, void* out, int64_t bytes);

  // Compares the calls and sizes that all members give, and moves nothing. `sent[k]` are the bytes
  // for member k, `due[k]` those expected from it.
  void check(const Call& call, const std::vector<int64_t>& sent, const std::vector<int64_t>& due);

  // Says to the members, which make a call, that this one has no memory for it: all throw Mismatch.
  // A call that has begun cannot be taken back, so then all throw Broken, now and later.
  [[noreturn]] void refuse(uint64_t steps_before);
  uint64_t steps() const { return meeting_.steps(); }

  // Copies x into shared memory and returns where every member's x can be read until `unstage`. No
  // other call may come between the two. Needs `room() >= bytes`.
  std::vector<void*> stage(const Call& call, const void* x, int64_t bytes);
  void unstage();
  // `set_bulk` gives stage() a segment of size() * bytes, mapped by all members, for an x that does
  // not fit in a slot; or takes it away. room(): the most bytes that stage() accepts.
  int64_t room() const { return bulk_ ? bulk_bytes_ : slot_bytes_; }
  void set_bulk(std::optional<Segment> segment, int64_t bytes);
  // Removes the names of the segments. To be called once all members have mapped them.
  void unlink();

  // In an all-reduce of at most `bytes` every member sends all of x to all; a longer one reduces x
  // in parts first. `narrow` is the limit for floats of two bytes, which cost more to add. All
  // members must set the same limits.
  void set_one_shot(int64_t bytes, int64_t narrow) {
    one_shot_bytes_ = bytes;
    one_shot_narrow_ = narrow;
  }
  // A member that sleeps in a call, the text of that call, and the step of each member.
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
  // Held during a call. Until it ends its thread is "in a call".
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
  // The offset of the part that goes from `from` to `to`, in a slot that is cut into one part for
  // each of the other members.
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
  // The thread that has staged, so that a call of the same thread raises and does not deadlock.
  // Atomic only because other threads compare it meanwhile: a thread finds its own id here only if
  // it stored it itself, so no order with other memory is needed.
  std::atomic<std::thread::id> stager_{};
};

}  // namespace consistent::peer
