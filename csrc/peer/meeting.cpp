#include "meeting.h"

#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <utility>

#include "segment.h"

namespace consistent::peer {
namespace {

constexpr double kSlice_s = 0.05;   // between two checks of which members are alive
constexpr size_t kMessage = 16384;  // bytes of the message in a broken group

// A member polls at least kLooks times and at least for kLooking_s before it sleeps. Between two
// polls it yields the processor: ranks often share a core, even where there are enough cores, and a
// member that spins would keep the ranks that it waits for from running. The time is that long
// because a virtual machine takes 50 to 200 µs to wake a sleeper, which then arrives late at the
// next meeting, so that the others sleep there. Measured for 1 KB between two ranks on two cores,
// with up to 150 µs of difference in their work between two meetings: 225 µs per meeting, and 465
// µs with 100 polls alone. Beside one and two other busy processes: 290 and 383 µs, and 349 and 454
// µs with 100 polls alone.
constexpr int kLooks = 100;
constexpr double kLooking_s = 0.001;

// A futex is a plain 32-bit word, and an atomic with a lock would not work between processes.
static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Sleeps while `word` is `value`, for kSlice_s at most. Not FUTEX_WAIT_PRIVATE: the word is shared
// between processes.
void futex_wait(std::atomic<uint32_t>& word, uint32_t value) {
  const timespec slice = {0, long(kSlice_s * 1e9)};
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAIT, value, &slice, nullptr, 0);
}

void futex_wake_all(std::atomic<uint32_t>& word) {
  syscall(SYS_futex, reinterpret_cast<uint32_t*>(&word), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

double now_s() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

std::string in_seconds(double seconds) {
  char text[32];
  snprintf(text, sizeof text, "%.1f s", seconds);
  return text;
}

}  // namespace

struct Meeting::Control {
  // How many times a member has arrived, modulo 2^32; members sleep on this word. Whether all have
  // arrived is read from it alone. If the last one to arrive stored that elsewhere, it could be
  // killed in between, and the others would wait for nobody.
  alignas(64) std::atomic<uint32_t> arrivals;
  std::atomic<uint32_t> sleepers;
  // 0: whole; 1: a member is writing `why`; 2: `why` can be read.
  alignas(64) std::atomic<uint32_t> broken;
  char why[kMessage];
};

struct Meeting::Member {
  alignas(64) std::atomic<uint64_t> step;  // the last step that this member has arrived at
  std::atomic<long> pid;
  std::atomic<unsigned long long> start;
  std::atomic<int64_t> failures;
};

size_t Meeting::bytes(int members) { return sizeof(Control) + sizeof(Member) * size_t(members); }

Meeting::Meeting(char* memory, int me, std::vector<int> ranks, double timeout_s,
                 Callbacks callbacks)
    : control_(reinterpret_cast<Control*>(memory)),
      members_(reinterpret_cast<Member*>(memory + sizeof(Control))),
      me_(me),
      ranks_(std::move(ranks)),
      timeout_s_(timeout_s),
      callbacks_(std::move(callbacks)) {
  // `start` before `pid`: a member with a pid and without a start would look ended to the others.
  members_[me_].start.store(started(getpid()));
  members_[me_].pid.store(getpid());
}

void Meeting::arrive() {
  ++step_;
  // Release: this member's writes to its slot, and its reads of the step before, happen before the
  // add, and a member that reads the count of all in met() synchronizes with each add. Without it,
  // a member could read a slot before it is written, or overwrite one that is still being read.
  // Sequentially consistent, as is the add in sleep(): either the sleeper sees the new count before
  // it sleeps, or this member sees it counted in `sleepers` and wakes it. With weaker orders both
  // could miss each other, and the sleeper would sleep on until its slice of 50 ms ends.
  control_->arrivals.fetch_add(1, std::memory_order_seq_cst);
  // Relaxed: `step` only tells who is missing; no data is read because of it. Stored after the add:
  // a member that is killed before its add must look missing to the others, which would otherwise
  // wait for it until the timeout.
  members_[me_].step.store(step_, std::memory_order_relaxed);
  if (!met()) return;
  if (control_->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(control_->arrivals);
}

void Meeting::tell_failures(int64_t count) {
  if (members_[me_].pid.load() != getpid()) return;  // a forked child is not a member
  // Release, pairs with the acquire in look_around(): who sees this count also sees the steps that
  // this member arrived at before the error.
  members_[me_].failures.store(count, std::memory_order_release);
}

// Acquire, pairs with the adds in arrive(): without it slots could be read as they were before the
// meeting.
bool Meeting::met() const {
  return all_arrived(control_->arrivals.load(std::memory_order_acquire));
}

bool Meeting::all_arrived(uint32_t arrivals) const {
  // Members that have met may arrive at the next step, but not at the one after it. So the count is
  // near that of this step, and their difference has a sign though both are modulo 2^32.
  return int32_t(arrivals - uint32_t(step_) * uint32_t(ranks_.size())) >= 0;
}

// Relaxed: no data is read because of it; throw_broken() waits until `why` is complete.
bool Meeting::is_broken() const { return control_->broken.load(std::memory_order_relaxed) != 0; }

void Meeting::wait(const std::function<std::string()>& what, int64_t failures) {
  const double begin = now_s();
  for (int k = 0; k < kLooks || now_s() - begin < kLooking_s; ++k) {
    if (met()) return;
    sched_yield();
  }
  sleep(what, failures);
}

// Marks this member as asleep for the lifetime of the object.
struct Meeting::Asleep {
  explicit Asleep(Meeting& meeting) : meeting(meeting) {
    const std::lock_guard<std::mutex> lock(meeting.sleeping_);
    meeting.asleep_since_s_ = now_s();
    meeting.sleeper_ = (unsigned long)pthread_self();
  }
  ~Asleep() {
    const std::lock_guard<std::mutex> lock(meeting.sleeping_);
    meeting.asleep_since_s_ = 0;
  }
  Meeting& meeting;
};

void Meeting::sleep(const std::function<std::string()>& what, int64_t failures) {
  const Asleep asleep(*this);
  const double begin = asleep_since_s_;
  while (!met()) {
    // Before FUTEX_WAIT compares `arrivals`: see arrive().
    control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    const uint32_t arrivals = control_->arrivals.load(std::memory_order_relaxed);
    if (!all_arrived(arrivals)) futex_wait(control_->arrivals, arrivals);
    // Any order would do: a late decrement only causes a needless wake that wakes nobody.
    control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (!met()) look_around(now_s() - begin, what, failures);
  }
}

void Meeting::with_sleeper(const std::function<void(const Sleeper&)>& look) const {
  const std::lock_guard<std::mutex> lock(sleeping_);
  if (asleep_since_s_ != 0) look({now_s() - asleep_since_s_, sleeper_});
}

void Meeting::look_around(double waited_s, const std::function<std::string()>& what,
                          int64_t failures) {
  check_whole();
  if (waited_s < kSlice_s * 0.5) return;  // woken early: it is too soon to look for the dead
  for (int k = 0; k < size(); ++k) {
    const long pid = members_[k].pid.load();
    const bool gone = pid != 0 && started(pid) != members_[k].start.load();
    // `step` is read after the process was seen to have ended, so it is final. A member that
    // arrived before it ended is not missing.
    if (gone && members_[k].step.load() < step_ && !met()) {
      give_up("rank " + std::to_string(ranks_[k]) + " (process " + std::to_string(pid) +
              ") has ended while rank " + std::to_string(ranks_[me_]) + " waits for it in " +
              what());
    }
    // `failures` is read before `step`: an error that the other one met after it had arrived at
    // this step is no reason to give up, as this member may meet it too.
    const bool failed = members_[k].failures.load(std::memory_order_acquire) > failures;
    if (failed && members_[k].step.load() < step_ && !met()) {
      give_up(
          other_step("rank " + std::to_string(ranks_[k]), "rank " + std::to_string(ranks_[me_])) +
          ", which waits for it in " + what());
    }
  }
  if (callbacks_.interrupted())
    give_up("rank " + std::to_string(ranks_[me_]) + " was interrupted in " + what());
  if (waited_s < timeout_s_) return;
  give_up("rank " + std::to_string(ranks_[me_]) + " has waited " + in_seconds(waited_s) + " for " +
          missing() + " in " + what());
}

std::vector<uint64_t> Meeting::steps_of_all() const {
  std::vector<uint64_t> steps;
  for (int k = 0; k < size(); ++k) steps.push_back(members_[k].step.load());
  return steps;
}

std::string Meeting::missing() const {
  std::string text;
  for (int k = 0; k < size(); ++k) {
    if (members_[k].step.load() >= step_) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(ranks_[k]);
  }
  return text;
}

void Meeting::give_up(const std::string& why) { break_up(callbacks_.give_up(why)); }

void Meeting::break_up(const std::string& words) {
  callbacks_.alarm->set_off(words);
  uint32_t whole = 0;
  // Only the member that changes `broken` from 0 to 1 writes `why`.
  if (control_->broken.compare_exchange_strong(whole, 1)) {
    const size_t length = std::min(words.size(), kMessage - 1);
    memcpy(control_->why, words.data(), length);
    control_->why[length] = 0;
    // Release: a member that sees 2 must see all of `why`.
    control_->broken.store(2, std::memory_order_release);
    futex_wake_all(control_->arrivals);  // it is unchanged, but members that wake check `broken`
  }
  throw_broken();
}

void Meeting::throw_broken() const {
  if (callbacks_.alarm->is_on()) throw Broken(callbacks_.alarm->words());
  const double begin = now_s();
  // Acquire, pairs with the store of 2, before which `why` may be incomplete. The wait ends after a
  // second, since the member that writes may have been killed.
  while (control_->broken.load(std::memory_order_acquire) != 2 && now_s() - begin < 1)
    sched_yield();
  const bool said = control_->broken.load(std::memory_order_acquire) == 2;
  callbacks_.alarm->set_off(said ? control_->why
                                 : "the group was broken by a rank that then ended");
  throw Broken(callbacks_.alarm->words());
}

}  // namespace consistent::peer
