// Where the members of a group wait for each other: a barrier in shared memory.
//
// A member that waits first polls for a moment whether all have arrived. Then it sleeps in the
// kernel and wakes every 50 ms to see whether the missing members are still alive. Once a member
// has died, been interrupted or come too late, the meeting is broken, and it stays so on every
// member: each throws the same message, where it waits or in its next call.

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

// What a member calls in its own process.
struct Callbacks {
  // Called now and then by a member that waits. It returns true if a signal asks it to give up.
  std::function<bool()> interrupted = [] { return false; };
  // Called with the reason by a member that gives up. It returns the message for all ranks to
  // raise.
  std::function<std::string(const std::string&)> give_up = [](const std::string& why) {
    return why;
  };
  // Goes off when a rank has given up, in this meeting or in another one.
  std::shared_ptr<Alarm> alarm = std::make_shared<Alarm>();
};

// A member that sleeps until the others come.
struct Sleeper {
  double seconds;
  unsigned long thread;  // as pthread_self() gives it
};

class Meeting {
 public:
  static size_t bytes(int members);

  // `memory` is shared by all members and zero before the first one joins. A member may be waited
  // for once all have joined, not earlier. `ranks` are the members' names in messages.
  Meeting(char* memory, int me, std::vector<int> ranks, double timeout_s, Callbacks callbacks);

  // Throws Broken if a rank has given up.
  void check_whole() const {
    if (callbacks_.alarm->is_on() || is_broken()) throw_broken();
  }
  // Tells the others that this member has arrived at the next step.
  void arrive();
  // Waits until all have arrived at it. `what` returns what the group is doing, for messages.
  // `failures` is how many errors this process had met that the others may not have met, when it
  // came here. Throws Broken.
  void wait(const std::function<std::string()>& what, int64_t failures = INT64_MAX);

  // Breaks the meeting for all members, who throw Broken with these words and where each of them
  // is.
  [[noreturn]] void give_up(const std::string& why);

  // Tells the others how many errors this process has met that they may not have met. A member that
  // waits for one with more errors than its own gives up: that one is at another step of the
  // program, perhaps in a call of another group, and will not come.
  void tell_failures(int64_t count);

  // Calls `look` if this member sleeps in a `wait`; the sleep does not end before `look` returns.
  void with_sleeper(const std::function<void(const Sleeper&)>& look) const;

  // How many steps this member has arrived at: the same on every member between two calls.
  uint64_t steps() const { return step_; }
  // The last step that each member has arrived at. One that made a call more is ahead.
  std::vector<uint64_t> steps_of_all() const;
  int me() const { return me_; }
  int size() const { return int(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  struct Control;
  struct Member;
  struct Asleep;

  bool met() const;
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

  mutable std::mutex sleeping_;  // guards the two below
  double asleep_since_s_ = 0;    // 0 while this member does not sleep
  unsigned long sleeper_ = 0;
};

}  // namespace consistent::peer
