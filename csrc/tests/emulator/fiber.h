// One thread of a block: a stack of its own, which the scheduler enters and which leaves to it.
// AddressSanitizer and ThreadSanitizer, where they are linked, are told of every switch; to
// ThreadSanitizer each fiber is a thread, and a switch orders nothing.

#pragma once

#include <ucontext.h>

#include <cstddef>

namespace emulator {

class Fiber {
 public:
  using Body = void (*)();  // called each time that the fiber is entered again, after it returned

  explicit Fiber(Body body);
  Fiber(const Fiber&) = delete;
  ~Fiber();

  // From the scheduler: runs the body up to its next leave() or to its end.
  void enter();
  // From the body: goes back to the scheduler. The next enter() returns from it.
  void leave();

 private:
  static void start(unsigned high, unsigned low);

  Body body_;
  char* memory_;
  ucontext_t first_;
  bool started_ = false;
  void* saved_[5];
  void* fake_stack_ = nullptr;
  void* thread_;  // ThreadSanitizer's
};

// Orders for ThreadSanitizer, by a tag: what came before a release comes before what follows an
// acquire after it.
void release(const void* tag);
void acquire(const void* tag);

}  // namespace emulator
