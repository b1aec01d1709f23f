// Where the members of a group wait for each other: a barrier in shared memory.
//
// A member looks for a moment whether all are there, then it sleeps in the kernel, waking now and
// then to see whether those who are missing still live. Once a member has died, been interrupted or
// come too late, the meeting is broken: every member that waits, now or later, throws the same
// words.

#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace consistent::peer {

struct Broken : std::runtime_error {
  using runtime_error::runtime_error;
};

class Meeting {
 public:
  static size_t bytes(int members);

  // `memory` is zero before the first member joins, and shared by all. `ranks` are the members'
  // names in messages. `interrupted` is asked now and then whether to give up (a signal came).
  Meeting(char* memory, int me, std::vector<int> ranks, double timeout_s,
          std::function<bool()> interrupted);

  // Tells the others that this member is there ...
  void arrive();
  // ... and waits for them. `what` says in messages what the group is doing. Throws Broken.
  void wait(const std::function<std::string()>& what);

  // How often all have met. The same on every member between two calls.
  uint64_t steps() const { return step_; }
  int me() const { return me_; }
  int size() const { return int(ranks_.size()); }
  const std::vector<int>& ranks() const { return ranks_; }

 private:
  struct Control;
  struct Member;

  bool met() const;
  void sleep(const std::function<std::string()>& what);
  void look_around(double waited_s, const std::function<std::string()>& what);
  [[noreturn]] void break_up(std::string why);
  [[noreturn]] void throw_broken() const;
  std::string missing() const;

  Control* control_;
  Member* members_;
  int me_;
  std::vector<int> ranks_;
  double timeout_s_;
  std::function<bool()> interrupted_;
  uint64_t step_ = 0;
};

}  // namespace consistent::peer
