// The alarm by which the threads of a process learn that a rank gave up waiting.

#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace consistent::peer {

// The message for ranks that have met different numbers of errors, and so are at different steps of
// the program.
inline std::string other_step(const std::string& failed, const std::string& other) {
  return failed + " has met an error in backward, a lack of memory or an interrupt that " + other +
         " has not met";
}

// Goes off at most once, with the message that every rank raises.
class Alarm {
 public:
  void set_off(std::string words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_on()) return;
    words_ = std::move(words);
    // Release: a thread that sees `on_` set reads `words_` without the lock, and must see all of
    // it.
    on_.store(true, std::memory_order_release);
  }
  // Acquire, pairs with the release in set_off(): without it, words() called next could read a
  // string that is still being written.
  bool is_on() const { return on_.load(std::memory_order_acquire); }
  // Call it only after is_on() was true: from then on the words do not change.
  const std::string& words() const { return words_; }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::string words_;
};

}  // namespace consistent::peer
