// To be compiled without a sanitizer: its own accesses are not those of a kernel.

#include "block.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "cuda_runtime.h"
#include "fiber.h"

uint3 threadIdx, blockIdx;
dim3 blockDim, gridDim;

namespace emulator {
namespace {

enum class At { running, block, warp, end };

struct Thread {
  std::unique_ptr<Fiber> fiber;
  At at = At::end;
  Place place{};  // where it waits
  Exchange* exchange = nullptr;
};

constexpr unsigned kMostThreads = 1024;

struct Running {
  Thread threads[kMostThreads];
  unsigned count = 0, current = 0;
  Grid grid{};
  void (*run)(const void*) = nullptr;
  const void* given = nullptr;
  // Memory of just the size, so that AddressSanitizer sees its end.
  void* dynamic_shared = nullptr;
  bool has_waited = false;  // whether a thread of this launch has waited for others
  std::mt19937 random;
  // Tags for ThreadSanitizer. Barriers take two in turn: with one, a thread that is ahead would
  // seem ordered before others that are still at the barrier before.
  char begin = 0, end = 0, block_tags[2]{}, warp_tags[kMostThreads / kLanes][2]{};
  unsigned block_turn = 0, warp_turns[kMostThreads / kLanes]{};
} now;

void run_thread() {
  acquire(&now.begin);
  now.run(now.given);
  release(&now.end);
  now.threads[now.current].at = At::end;
}

void go_on(unsigned thread) {
  now.current = thread;
  threadIdx = {thread, 0, 0};
  now.threads[thread].at = At::running;
  now.threads[thread].fiber->enter();
}

void wait(At at, Place place) {
  Thread& me = now.threads[now.current];
  me.at = at, me.place = place, now.has_waited = true;
  me.fiber->leave();
}

// Lets all threads go on if all wait at one barrier of the block.
bool pass_barrier() {
  const Thread& first = now.threads[0];
  for (unsigned t = 0; t < now.count; ++t) {
    const Thread& other = now.threads[t];
    if (other.at != At::block) return false;
    if (other.place.line != first.place.line || other.place.file != first.place.file) {
      fail("threads wait at different __syncthreads", other.place);
    }
  }
  ++now.block_turn;
  for (unsigned t = 0; t < now.count; ++t) now.threads[t].at = At::running;
  return true;
}

// Whether all lanes that lane `t` waits for are there. Ends the program where they are elsewhere.
bool all_are_there(unsigned t, unsigned first) {
  const Thread& me = now.threads[t];
  const unsigned mask = me.exchange->mask;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    if (first + l >= now.count) fail("a mask names lanes beyond the block", me.place);
    const Thread& other = now.threads[first + l];
    if (other.at != At::warp) return false;
    const bool same = other.place.line == me.place.line && other.place.file == me.place.file;
    if (!same || other.exchange->mask != mask) {
      fail("lanes of a mask wait at different places or for different masks", other.place);
    }
  }
  return true;
}

void give(unsigned mask, unsigned first) {
  uint64_t words[kLanes] = {};
  unsigned votes = 0;
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    words[l] = now.threads[first + l].exchange->word;
    votes |= unsigned(words[l] != 0) << l;
  }
  for (unsigned l = 0; l < kLanes; ++l) {
    if (!(mask >> l & 1)) continue;
    Thread& to = now.threads[first + l];
    const int source = to.exchange->source;
    if (!(mask >> source & 1)) fail("a lane reads one that is not in the mask", to.place);
    to.exchange->word = words[source], to.exchange->votes = votes;
    to.at = At::running;
  }
  ++now.warp_turns[first / kLanes];
}

bool pass_warps() {
  bool passed = false;
  for (unsigned t = 0; t < now.count; ++t) {
    const unsigned first = t / kLanes * kLanes;
    if (now.threads[t].at != At::warp || !all_are_there(t, first)) continue;
    give(now.threads[t].exchange->mask, first);
    passed = true;
  }
  return passed;
}

[[noreturn]] void fail_stuck() {
  Place place{};
  unsigned at[4] = {};
  for (unsigned t = 0; t < now.count; ++t) {
    const Thread& thread = now.threads[t];
    ++at[int(thread.at)];
    if (thread.at != At::end) place = thread.place;
  }
  char text[200];
  snprintf(text, sizeof text,
           "no thread can go on: %u wait at a __syncthreads, %u for lanes of their warp, %u have "
           "ended",
           at[int(At::block)], at[int(At::warp)], at[int(At::end)]);
  fail(text, place);
}

void run_block() {
  std::vector<unsigned> order(now.count);
  std::iota(order.begin(), order.end(), 0u);
  for (unsigned t : order) now.threads[t].at = At::running;
  for (;;) {
    std::shuffle(order.begin(), order.end(), now.random);
    for (unsigned t : order) {
      if (now.threads[t].at == At::running) go_on(t);
    }
    const auto ended = [](const Thread& thread) { return thread.at == At::end; };
    if (std::all_of(now.threads, now.threads + now.count, ended)) return;
    if (!pass_barrier() && !pass_warps()) fail_stuck();
  }
}

// The bytes are not a number in any type, since a GPU does not clear them either.
void make_dynamic_shared(size_t bytes) {
  if (bytes == 0) return;
  if (posix_memalign(&now.dynamic_shared, 16, bytes) != 0) fail("no memory", Place{});
  memset(now.dynamic_shared, 0xFF, bytes);
}

void run_blocks() {
  const dim3 grid = now.grid.blocks;
  std::vector<unsigned> order(grid.x * grid.y);
  std::iota(order.begin(), order.end(), 0u);
  std::shuffle(order.begin(), order.end(), now.random);
  for (unsigned block : order) {
    blockIdx = {block % grid.x, block / grid.x, 0};
    make_dynamic_shared(now.grid.shared_bytes);
    release(&now.begin);
    run_block();
    // The memory of __shared__ variables is that of the block before. Where threads never wait
    // there are none to speak of, and blocks are as unordered as on the GPU.
    if (now.has_waited || now.dynamic_shared != nullptr) acquire(&now.end);
    free(now.dynamic_shared);
    now.dynamic_shared = nullptr;
  }
}

}  // namespace

[[noreturn]] void fail(const char* why, Place place) {
  fprintf(stderr, "emulator: %s (%s:%d, thread %u, block %u, %u)\n", why,
          place.file ? place.file : "no place", place.line, now.current, blockIdx.x, blockIdx.y);
  abort();
}

void run_grid(const Grid& grid, void (*run)(const void*), const void* given) {
  if (!note_launch(grid)) return;
  now.grid = grid, now.run = run, now.given = given, now.count = grid.threads;
  now.has_waited = false;
  gridDim = grid.blocks, blockDim = dim3(grid.threads);
  for (unsigned t = 0; t < now.count; ++t) {
    if (!now.threads[t].fiber) now.threads[t].fiber = std::make_unique<Fiber>(run_thread);
  }
  run_blocks();
  acquire(&now.end);
}

void* dynamic_shared() { return now.dynamic_shared; }

int lane() { return int(now.current) % kLanes; }

void wait_for_block(Place place) {
  const char* const tag = &now.block_tags[now.block_turn % 2];
  release(tag);
  wait(At::block, place);
  acquire(tag);
}

void exchange(Exchange& mine, Place place) {
  const unsigned warp = now.current / kLanes;
  if (!(mine.mask >> lane() & 1)) fail("a lane is not in its own mask", place);
  const char* const tag = &now.warp_tags[warp][now.warp_turns[warp] % 2];
  now.threads[now.current].exchange = &mine;
  if (mine.ordering) release(tag);
  wait(At::warp, place);
  if (mine.ordering) acquire(tag);
}

}  // namespace emulator
