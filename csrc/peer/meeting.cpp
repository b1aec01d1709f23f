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

// A member polls this often, and for this time, before it sleeps. Between two polls it yields the
// processor: ranks often share one, even where there are enough, and a member that spins would keep
// the ranks that it waits for from running. To wake a sleeper takes a virtual machine 50 to 200 µs,
// by which it comes late to the next meeting, where the others sleep. Measured for 1 KB between two
// ranks on two cores, ranks that work up to 150 µs more than each other between two meetings:
// 225 µs a meeting; 465 µs with 100 polls. Beside one and two other busy processes: 290 and 383 µs;
// 349 and 454 µs with 100 polls.
constexpr int kLooks = 100;
constexpr double kLooking_s = 0.001;

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Sleeps while `word` is `value`, for kSlice_s at most.
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
  alignas(64) std::atomic<uint64_t> arrivals;
  alignas(64) std::atomic<uint32_t> met;  // the number of the last step that all arrived at
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> broken;  // 0 whole, 1 `why` is written, 2 `why` can be read
  char why[kMessage];
};

struct Meeting::Member {
  alignas(64) std::atomic<uint64_t> step;  // the last one that it has arrived at
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
  // In this order: a member whose pid is known and whose start is not would look ended to others.
  members_[me_].start.store(started(getpid()));
  members_[me_].pid.store(getpid());
}

void Meeting::arrive() {
  ++step_;
  // Release: what this member wrote to its slot, and its reads of the step before, come first.
  // Acquire: the last to arrive takes over what all others released, and its store of `met` passes
  // that on. Without them a member could read a slot before it is written, or write over one that
  // is still being read.
  const auto arrived = control_->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1;
  // Relaxed: it only tells who is missing, and no data is read on the strength of it. After the
  // add: others go on waiting for a member that is killed in between, and must see that it is
  // missing.
  members_[me_].step.store(step_, std::memory_order_relaxed);
  if (arrived != step_ * ranks_.size()) return;
  // Sequentially consistent, with the add in sleep(): either the sleeper sees the new number before
  // it sleeps, or it is counted here and woken. With weaker orders both could miss each other, and
  // the member would sleep on until its slice of 50 ms ends.
  control_->met.store(uint32_t(step_), std::memory_order_seq_cst);
  if (control_->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(control_->met);
}

void Meeting::tell_failures(int64_t count) {
  if (members_[me_].pid.load() != getpid()) return;  // a process that was forked is no member
  // Release, for look_around(): who sees the count sees the steps that came before the error.
  members_[me_].failures.store(count, std::memory_order_release);
}

// Acquire, for the store of `met`: without it slots could be read as they were before the meeting.
bool Meeting::met() const {
  return control_->met.load(std::memory_order_acquire) == uint32_t(step_);
}

// Relaxed: it only says that `why` will come; throw_broken() waits for it before reading it.
bool Meeting::is_broken() const { return control_->broken.load(std::memory_order_relaxed) != 0; }

void Meeting::wait(const std::function<std::string()>& what, int64_t failures) {
  const double begin = now_s();
  for (int k = 0; k < kLooks || now_s() - begin < kLooking_s; ++k) {
    if (met()) return;
    sched_yield();
  }
  sleep(what, failures);
}

// Marks this member as asleep for as long as the object lives.
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
    // Before `met` is looked at, which the kernel does: see arrive().
    control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(control_->met, uint32_t(step_ - 1));
    // Any order would do: a count that falls late only costs a needless call that wakes nobody.
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
    // The step is read after the process was seen to have ended, so it is final: a member that
    // arrived before it ended is not missing.
    if (gone && members_[k].step.load() < step_ && !met()) {
      give_up("rank " + std::to_string(ranks_[k]) + " (process " + std::to_string(pid) +
              ") has ended while rank " + std::to_string(ranks_[me_]) + " waits for it in " +
              what());
    }
    // Read before the step: an error after this step is one that this member may meet, too.
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
  // Only one member writes `why`, the one that takes `broken` from 0 to 1.
  if (control_->broken.compare_exchange_strong(whole, 1)) {
    const size_t length = std::min(words.size(), kMessage - 1);
    memcpy(control_->why, words.data(), length);
    control_->why[length] = 0;
    // Release: a member that sees 2 must see all of `why`.
    control_->broken.store(2, std::memory_order_release);
    futex_wake_all(control_->met);  // `met` is unchanged, but those who wake look at `broken`
  }
  throw_broken();
}

void Meeting::throw_broken() const {
  if (callbacks_.alarm->is_on()) throw Broken(callbacks_.alarm->words());
  const double begin = now_s();
  // Acquire, for the store of 2: before it `why` may be half written. The wait ends after a second,
  // for the member that writes may have been killed.
  while (control_->broken.load(std::memory_order_acquire) != 2 && now_s() - begin < 1)
    sched_yield();
  const bool said = control_->broken.load(std::memory_order_acquire) == 2;
  callbacks_.alarm->set_off(said ? control_->why
                                 : "the group was broken by a rank that then ended");
  throw Broken(callbacks_.alarm->words());
}

}  // namespace consistent::peer
