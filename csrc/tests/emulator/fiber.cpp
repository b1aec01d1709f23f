// To be compiled without a sanitizer, whose hooks are found when the program is linked.

#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>

extern "C" {
__attribute__((weak)) void __sanitizer_start_switch_fiber(void**, const void*, size_t);
__attribute__((weak)) void __sanitizer_finish_switch_fiber(void*, const void**, size_t*);
__attribute__((weak)) void* __tsan_get_current_fiber();
__attribute__((weak)) void* __tsan_create_fiber(unsigned);
__attribute__((weak)) void __tsan_destroy_fiber(void*);
__attribute__((weak)) void __tsan_switch_to_fiber(void*, unsigned);
__attribute__((weak)) void __tsan_acquire(void*);
__attribute__((weak)) void __tsan_release(void*);

// The host's memory is not the subject, and a leak is looked for on the wrong stacks.
const char* __asan_default_options() {
  return "detect_leaks=0:detect_stack_use_after_return=0:abort_on_error=0";
}
const char* __tsan_default_options() { return "halt_on_error=1:report_signal_unsafe=0"; }
}

namespace emulator {
namespace {

constexpr size_t kStackBytes = 256 << 10, kGuardBytes = 4096;
constexpr unsigned kOrdersNothing = 1;  // __tsan_switch_to_fiber_no_sync

// The scheduler: the stack and the thread from which fibers are entered.
struct Scheduler {
  void* saved[5];
  void *thread = nullptr, *fake_stack = nullptr;
  const void* stack = nullptr;
  size_t stack_bytes = 0;
} scheduler;

// To another stack. It is in a function of its own: setjmp and longjmp may not share one.
__attribute__((noinline)) void jump(void** to) { __builtin_longjmp(to, 1); }

}  // namespace

void release(const void* tag) {
  if (__tsan_release) __tsan_release(const_cast<void*>(tag));
}

void acquire(const void* tag) {
  if (__tsan_acquire) __tsan_acquire(const_cast<void*>(tag));
}

Fiber::Fiber(Body body) : body_(body) {
  void* const memory = mmap(nullptr, kGuardBytes + kStackBytes, PROT_READ | PROT_WRITE,
                            MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED || mprotect(memory, kGuardBytes, PROT_NONE) != 0) {
    perror("emulator: no stack for a thread");
    abort();
  }
  memory_ = static_cast<char*>(memory);
  thread_ = __tsan_create_fiber ? __tsan_create_fiber(0) : nullptr;
}

Fiber::~Fiber() {
  if (thread_ != nullptr) __tsan_destroy_fiber(thread_);
  munmap(memory_, kGuardBytes + kStackBytes);
}

void Fiber::start(unsigned high, unsigned low) {
  Fiber& me = *reinterpret_cast<Fiber*>(uint64_t(high) << 32 | low);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(nullptr, &scheduler.stack, &scheduler.stack_bytes);
  }
  for (;;) {
    me.body_();
    me.leave();
  }
}

void Fiber::enter() {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&scheduler.fake_stack, memory_ + kGuardBytes, kStackBytes);
  }
  if (thread_ != nullptr) {
    scheduler.thread = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(thread_, kOrdersNothing);
  }
  if (__builtin_setjmp(scheduler.saved) == 0) {
    if (started_) jump(saved_);
    started_ = true;
    getcontext(&first_);
    first_.uc_stack.ss_sp = memory_ + kGuardBytes, first_.uc_stack.ss_size = kStackBytes;
    first_.uc_link = nullptr;
    const uint64_t self = reinterpret_cast<uint64_t>(this);
    makecontext(&first_, reinterpret_cast<void (*)()>(&Fiber::start), 2, unsigned(self >> 32),
                unsigned(self));
    setcontext(&first_);
  }
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(scheduler.fake_stack, nullptr, nullptr);
  }
}

void Fiber::leave() {
  if (__sanitizer_start_switch_fiber) {
    __sanitizer_start_switch_fiber(&fake_stack_, scheduler.stack, scheduler.stack_bytes);
  }
  if (thread_ != nullptr) __tsan_switch_to_fiber(scheduler.thread, kOrdersNothing);
  if (__builtin_setjmp(saved_) == 0) jump(scheduler.saved);
  if (__sanitizer_finish_switch_fiber) {
    __sanitizer_finish_switch_fiber(fake_stack_, &scheduler.stack, &scheduler.stack_bytes);
  }
}

}  // namespace emulator
