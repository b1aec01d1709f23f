// What a process learns from elsewhere while its ranks communicate: that a rank gave up waiting.

#pragma once

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

namespace consistent::peer {

// Said where ranks have met different numbers of errors: they are at different steps of the
// program.
inline std::string other_step(const std::string& failed, const std::string& other) {
  return failed + " has met an error in backward, a lack of memory or an interrupt that " + other +
         " has not met";
}

// Goes off once, with the message that every rank raises.
class Alarm {
 public:
  void set_off(std::string words) {
    const std::lock_guard<std::mutex> lock(mutex_);
    if (is_on()) return;
    words_ = std::move(words);
    // Release: a thread that sees `on_` must see `words_` complete, which it reads without the
    // lock.
    on_.store(true, std::memory_order_release);
  }
  // Acquire, for set_off()'s release: words() called after it would otherwise read a string that is
  // still being written.
  bool is_on() const { return on_.load(std::memory_order_acquire); }
  // To be called only once it is on: from then on the words do not change.
  const std::string& words() const { return words_; }

 private:
  std::atomic<bool> on_{false};
  std::mutex mutex_;
  std::string words_;
};

}  // namespace consistent::peer
