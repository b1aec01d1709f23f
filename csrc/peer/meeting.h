// A barrier in shared memory, at which the members of a group wait for each other.
//
// A waiting member first polls for about a millisecond whether all have arrived. Then it sleeps in
// a futex and wakes every 50 ms to check whether the missing members are still alive. Once a member
// has died, was interrupted or timed out, the meeting is broken for good on every member: each
// throws Broken with the same message, where it waits or in its next call.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "alarm.h"

namespace consistent::peer {

struct Broken : std::runtime_error {
  using runtime_error::runtime_error;
};

// Functions that a member calls in its own process.
struct Callbacks {
  // Called every 50 ms or so by a member that sleeps. Returns true if a signal asks it to give up.
  std::function<bool()> interrupted = [] { return false; };
  // Called with the reason by a member that gives up. Returns the message that all ranks raise.
  std::function<std::string(const std::string&)> give_up = [](const std::string& why) {
    return why;
  };
  // Goes off when a rank has given up, in this meeting or in another one.
  std::shared_ptr<Alarm> alarm = std::make_shared<Alarm>();
};

// A member that sleeps until the others arrive: since when, and in which thread.
struct Sleeper {
  double seconds;
  unsigned long thread;  // its pthread_self()
};

class Meeting {
 public:
  static size_t bytes(int members);

  // `memory` is shared by all members and is all zeros before the first one joins. Members may wait
  // only after all have joined. `ranks` are the members' names in messages.
  Meeting(char* memory, int me, std::vector<int> ranks, double timeout_s, Callbacks callbacks);

  // Throws Broken if a rank has given up.
  void check_whole() const {
    if (callbacks_.alarm->is_on() || is_broken()) throw_broken();
  }
  // Tells the others that this member has arrived at the next step.
  void arrive();
  // Waits until all have arrived at that step. `what` returns what the group is doing, for
  // messages. `failures` is the number of errors that this process had met, and the others may not
  // have met, when it began the call. Throws Broken.
  void wait(const std::function<std::string()>& what, int64_t failures = INT64_MAX);

  // Breaks the meeting: all members throw Broken with the message that callbacks.give_up(why)
  // gives.
  [[noreturn]] void give_up(const std::string& why);

  // Tells the others how many errors this process has met that they may not have met. A member
  // gives up if it waits for another one with more errors than its own: the other one is at another
  // step of the program, perhaps in a call of another group, and will not arrive.
  void tell_failures(int64_t count);

  // Calls `look` if this member sleeps in wait(). The sleep does not end before `look` returns.
  void with_sleeper(const std::function<void(const Sleeper&)>& look) const;

  // How many steps this member has arrived at: the same on every member between two calls.
  uint64_t steps() const { return step_; }
  // The last step that each member has arrived at. A member that is one call ahead has more.
  std::vector<uint64_t> steps_of_all() const;
  int me() const { return me_; }
  int size() const { return int(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  struct Control;
  struct Member;
  struct Asleep;

  bool met() const;
  bool all_arrived(uint32_t arrivals) const;
  bool is_broken() const;
  void sleep(const std::function<std::string()>& what, int64_t failures);
  void look_around(double waited_s, const std::function<std::string()>& what, int64_t failures);
  [[noreturn]] void break_up(const std::string& words);
  [[noreturn]] void throw_broken() const;
  std::string missing() const;

  Control* control_;
  Member* members_;
  int me_;
  std::vector<int> ranks_;
  double timeout_s_;
  Callbacks callbacks_;
  uint64_t step_ = 0;

  mutable std::mutex sleeping_;  // guards the two members below
  double asleep_since_s_ = 0;    // 0 while this member does not sleep
  unsigned long sleeper_ = 0;
};

}  // namespace consistent::peer
