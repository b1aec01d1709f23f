// What a kernel sees of its block and its warp, and how a grid is run: block after block, in a
// random order, each thread of a block a fiber. A thread runs until it waits for others; which one
// goes on is random too.
//
// A program ends with a message where a GPU would hang or give undefined values: threads wait at
// different barriers, or for one that has ended; lanes do different things; a lane is not in its
// own mask, or reads one that is not.
//
// ThreadSanitizer sees as ordered what CUDA orders: a barrier of the block or the warp. A shuffle
// or a vote orders nothing.

#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

struct uint3 {
  unsigned x, y, z;
};
struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned across = 1, unsigned down = 1, unsigned deep = 1)
      : x(across), y(down), z(deep) {}
};

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace emulator {

constexpr int kLanes = 32;

struct Place {
  const char* file;
  int line;
};

struct Grid {
  dim3 blocks;
  unsigned threads;
  size_t shared_bytes;
  const void* kernel;
};

[[noreturn]] void fail(const char* why, Place place);

// Calls run(given) once for each thread of the grid. What is wrong with the launch is kept for
// cudaGetLastError().
void run_grid(const Grid& grid, void (*run)(const void* given), const void* given);

void* dynamic_shared();

// Waits for all threads of the block.
void wait_for_block(Place place);

// Waits for the lanes of `mask`; `ordering` makes it a barrier. Gives what lane `source` has put in
// `word`, and in `votes` a bit for each lane of the mask that has put something else than 0.
struct Exchange {
  unsigned mask;
  int source;
  bool ordering;
  uint64_t word;
  unsigned votes;
};
void exchange(Exchange& mine, Place place);
int lane();

// The value of `value` in lane `source`.
template <class T>
T shuffled(unsigned mask, T value, int source, Place place) {
  static_assert(std::is_arithmetic<T>::value && sizeof(T) <= 8, "CUDA shuffles 4 or 8 bytes");
  Exchange mine{mask, source, false, 0, 0};
  memcpy(&mine.word, &value, sizeof value);
  exchange(mine, place);
  memcpy(&value, &mine.word, sizeof value);
  return value;
}

inline unsigned votes_of(unsigned mask, bool vote, Place place) {
  Exchange mine{mask, lane(), false, vote, 0};
  exchange(mine, place);
  return mine.votes;
}

template <class... Wanted>
void launch(dim3 blocks, unsigned threads, size_t shared_bytes, void (*kernel)(Wanted...),
            const std::common_type_t<Wanted>&... given) {
  static_assert((sizeof(Wanted) + ... + 0) <= 4096, "the parameters of a kernel have 4 KB");
  const auto run = [&] { kernel(given...); };
  using Run = decltype(run);
  run_grid(
      {blocks, threads, shared_bytes, reinterpret_cast<const void*>(kernel)},
      [](const void* each) { (*static_cast<const std::decay_t<Run>*>(each))(); }, &run);
}

}  // namespace emulator

// The place of a call, by default arguments.
#define EMULATOR_PLACE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMULATOR_PLACE) { ::emulator::wait_for_block({file, line}); }

inline void __syncwarp(unsigned mask = 0xFFFFFFFFu, EMULATOR_PLACE) {
  ::emulator::Exchange mine{mask, ::emulator::lane(), true, 0, 0};
  ::emulator::exchange(mine, {file, line});
}

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = 32, EMULATOR_PLACE) {
  const int first = ::emulator::lane() / width * width;
  return ::emulator::shuffled(mask, value, first + source % width, {file, line});
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, int bits, int width = 32, EMULATOR_PLACE) {
  const int own = ::emulator::lane(), other = own ^ bits;
  const bool inside = other < own / width * width + width;
  return ::emulator::shuffled(mask, value, inside ? other : own, {file, line});
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_PLACE) {
  const int own = ::emulator::lane();
  const bool inside = own % width + int(by) < width;
  return ::emulator::shuffled(mask, value, inside ? own + int(by) : own, {file, line});
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned by, int width = 32, EMULATOR_PLACE) {
  const int own = ::emulator::lane();
  const bool inside = own % width >= int(by);
  return ::emulator::shuffled(mask, value, inside ? own - int(by) : own, {file, line});
}

inline unsigned __ballot_sync(unsigned mask, int vote, EMULATOR_PLACE) {
  return ::emulator::votes_of(mask, vote != 0, {file, line});
}
inline int __any_sync(unsigned mask, int vote, EMULATOR_PLACE) {
  return ::emulator::votes_of(mask, vote != 0, {file, line}) != 0;
}
inline int __all_sync(unsigned mask, int vote, EMULATOR_PLACE) {
  return ::emulator::votes_of(mask, vote != 0, {file, line}) == mask;
}

// Atomics order nothing else, as on the GPU.
template <class T>
T atomicCAS(T* at, T wanted, T made) {
  __atomic_compare_exchange(at, &wanted, &made, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
  return wanted;
}
template <class T, class Change>
T atomicChange(T* at, const Change& change) {
  T seen, made;
  __atomic_load(at, &seen, __ATOMIC_RELAXED);
  do {
    made = change(seen);
  } while (!__atomic_compare_exchange(at, &seen, &made, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return seen;
}
template <class T>
T atomicAdd(T* at, std::common_type_t<T> by) {
  return atomicChange(at, [by](T seen) { return T(seen + by); });
}
template <class T>
T atomicMax(T* at, std::common_type_t<T> by) {
  return atomicChange(at, [by](T seen) { return seen < by ? by : seen; });
}
template <class T>
T atomicMin(T* at, std::common_type_t<T> by) {
  return atomicChange(at, [by](T seen) { return by < seen ? by : seen; });
}
template <class T>
T atomicOr(T* at, std::common_type_t<T> bits) {
  return atomicChange(at, [bits](T seen) { return T(seen | bits); });
}
template <class T>
T atomicExch(T* at, std::common_type_t<T> by) {
  return atomicChange(at, [by](T) { return by; });
}
