#include "meeting.h"

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <climits>
#include <cstring>
#include <ctime>
#include <utility>

#include "segment.h"

namespace consistent::peer {
namespace {

constexpr double kSlice_s = 0.05;  // between two looks at who lives
constexpr size_t kMessage = 2048;

// Looks before the sleep, and the processor is offered between two. Ranks are often on one
// processor, also where there are enough: without the offer, who spins keeps those away who are
// waited for. Measured for 1 KB between two ranks on two busy cores: 1 to 2 µs; with 40 µs of
// spinning in place of it 85 µs, with no looks at all 4 µs.
constexpr int kLooks = 100;

static_assert(std::atomic<uint32_t>::is_always_lock_free && sizeof(std::atomic<uint32_t>) == 4);

// Sleeps while `word` is `value`, for a slice at most.
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

}  // namespace

struct Meeting::Control {
  alignas(64) std::atomic<uint64_t> arrivals;
  alignas(64) std::atomic<uint32_t> met;  // the number of the last step that all arrived at
  std::atomic<uint32_t> sleepers;
  alignas(64) std::atomic<uint32_t> broken;  // 0 whole, 1 being broken, 2 broken: `why` can be read
  char why[kMessage];
};

struct Meeting::Member {
  alignas(64) std::atomic<uint64_t> step;  // it has arrived at
  std::atomic<long> pid;
  std::atomic<unsigned long long> start;
};

size_t Meeting::bytes(int members) { return sizeof(Control) + sizeof(Member) * size_t(members); }

Meeting::Meeting(char* memory, int me, std::vector<int> ranks, double timeout_s,
                 std::function<bool()> interrupted)
    : control_(reinterpret_cast<Control*>(memory)),
      members_(reinterpret_cast<Member*>(memory + sizeof(Control))),
      me_(me),
      ranks_(std::move(ranks)),
      timeout_s_(timeout_s),
      interrupted_(std::move(interrupted)) {
  members_[me_].pid.store(getpid());
  members_[me_].start.store(started(getpid()));
}

void Meeting::arrive() {
  ++step_;
  members_[me_].step.store(step_, std::memory_order_relaxed);
  if (control_->arrivals.fetch_add(1, std::memory_order_acq_rel) + 1 != step_ * ranks_.size())
    return;
  // Either a sleeper sees the new number before it sleeps, or it is counted here and woken.
  control_->met.store(uint32_t(step_), std::memory_order_seq_cst);
  if (control_->sleepers.load(std::memory_order_seq_cst) != 0) futex_wake_all(control_->met);
}

bool Meeting::met() const {
  return control_->met.load(std::memory_order_acquire) == uint32_t(step_);
}

void Meeting::wait(const std::function<std::string()>& what) {
  for (int k = 0; k < kLooks; ++k) {
    if (met()) return;
    sched_yield();
  }
  sleep(what);
}

void Meeting::sleep(const std::function<std::string()>& what) {
  const double begin = now_s();
  while (!met()) {
    control_->sleepers.fetch_add(1, std::memory_order_seq_cst);
    futex_wait(control_->met, uint32_t(step_ - 1));
    control_->sleepers.fetch_sub(1, std::memory_order_seq_cst);
    if (!met()) look_around(now_s() - begin, what);
  }
}

void Meeting::look_around(double waited_s, const std::function<std::string()>& what) {
  if (control_->broken.load(std::memory_order_acquire) != 0) throw_broken();
  if (waited_s < kSlice_s * 0.5) return;  // woken for a step that was not ours to wait for
  for (int k = 0; k < size(); ++k) {
    const long pid = members_[k].pid.load();
    const bool gone = pid != 0 && started(pid) != members_[k].start.load();
    // Looked at last: who arrived before it ended owes nothing.
    if (gone && members_[k].step.load() < step_ && !met()) {
      break_up("rank " + std::to_string(ranks_[k]) + " (process " + std::to_string(pid) +
               ") has ended while rank " + std::to_string(ranks_[me_]) + " waits for it in " +
               what() + ".\n  What it held is lost.\n  Look at its own output for the reason.");
    }
  }
  if (interrupted_())
    break_up("rank " + std::to_string(ranks_[me_]) + " was interrupted in " + what() + ".");
  if (waited_s < timeout_s_) return;
  break_up("rank " + std::to_string(ranks_[me_]) + " has waited " + std::to_string(int(waited_s)) +
           " s for " + missing() + " in " + what() +
           ".\n  Ranks of one group must make the same calls in the same order.\n  Look for a "
           "branch that only some ranks take, or give init_process_group a longer timeout.");
}

std::string Meeting::missing() const {
  std::string text;
  for (int k = 0; k < size(); ++k) {
    if (members_[k].step.load() >= step_) continue;
    text += (text.empty() ? "rank " : ", rank ") + std::to_string(ranks_[k]);
  }
  return text;
}

void Meeting::break_up(std::string why) {
  why += "\n  The group stays broken: end its processes and start them again.";
  uint32_t whole = 0;
  if (control_->broken.compare_exchange_strong(whole, 1)) {
    const size_t length = std::min(why.size(), kMessage - 1);
    memcpy(control_->why, why.data(), length);
    control_->why[length] = 0;
    control_->broken.store(2, std::memory_order_release);
    futex_wake_all(control_->met);
  }
  throw_broken();
}

void Meeting::throw_broken() const {
  const double begin = now_s();
  while (control_->broken.load(std::memory_order_acquire) != 2 && now_s() - begin < 1)
    sched_yield();
  throw Broken(control_->broken.load(std::memory_order_acquire) == 2
                   ? control_->why
                   : "the group was broken by a rank that then ended");
}

}  // namespace consistent::peer
