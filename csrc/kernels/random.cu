// Random values on CUDA.
//
//   for e in the elements of the box:  // e: row-major index in the logical tensor
//     word(e) = word e % n of philox(seed, counter, e / n)  // n: 4 words of 32 bits, 2 of 64 bits
//     fill, e even: out[e], out[e + 1] = T(a), T(b) with a, b = distribution(word(e), word(e + 1))
//     bernoulli:    out[e] = T(double(word(e)) < p[e] * 2^32 ? 1 : 0)
//     dropout:      out[e] = T(R(x[e]) * (word(e) <= last ? R(scale) : 0))
//
// a and b are in R, int64 or double (distributions.h), and are rounded to T once.
//
// A thread takes a stretch: adjacent elements of the logical tensor that fill 16 bytes or more and
// cover whole Philox blocks. It computes these blocks and writes the elements that lie inside the
// run of the box. Threads share nothing. The mathematics is in distributions.h, as for the CPU.
// Most boxes are one run, of which a loop of few instructions takes all stretches but those at its
// ends.

#include <algorithm>

#include "check.h"
#include "distributions.h"
#include "launch.cuh"
#include "vector.cuh"

namespace consistent {
namespace {

constexpr int kThreads = 256;

// The largest grids; for more stretches, threads loop. A kernel that reads memory is fastest if
// each thread takes one stretch. One that only computes is faster if its threads prepare their
// loops less often: 4,096 blocks fill a GPU a few times.
constexpr int64_t kMostReading = most_blocks(INT32_MAX), kMostComputing = most_blocks(1 << 12);

// The elements of a stretch: as many Philox blocks, of kPerBlock elements each, as fill 16 bytes,
// but at least one and at most four.
template <class T, int kPerBlock>
constexpr int kStretchOf = std::min(std::max(kPerBlock, 16 / int(sizeof(T))), 4 * kPerBlock);

// Where a stretch lies: its element l is element `first + l` of the logical tensor and has local
// index `at + l`. Elements [begin, end) of the stretch lie inside the run. `at` may be negative.
struct Place {
  uint64_t first;
  int64_t at;
  int begin, end;
};

// A stretch that lies inside the run as a whole, at addresses that are aligned for packs.
struct WholePlace {
  uint64_t first;
  int64_t at;
};

__host__ __device__ inline int64_t stretches_in_run(const Box& box, int stretch) {
  return (box.run + stretch - 2) / stretch + 1;  // enough for a run that begins inside a stretch
}

// The run r and the stretch j of that run for a flat index; `at` is where the run begins. For one
// run no division is needed.
struct Start {
  int64_t r, j, at;
  __device__ __forceinline__ Start(const Box& box, int64_t stretches, int64_t index) {
    if (box.runs == 1) {
      r = 0, j = index, at = box.offset;
    } else {
      r = index / stretches, j = index - r * stretches, at = box.run_start(r);
    }
  }
};

template <int kStretch>
__device__ __forceinline__ Place place_of(const Box& box, int64_t stretches, int64_t index) {
  const Start start(box, stretches, index);
  const uint64_t first = (uint64_t(start.at) / kStretch + uint64_t(start.j)) * kStretch;
  const int64_t inside = int64_t(first) - start.at, left = box.run - inside;
  return Place{first, start.r * box.run + inside, inside < 0 ? int(-inside) : 0,
               left < kStretch ? int(left) : kStretch};
}

// Calls visit(place) for each stretch of this thread that meets the box: with a WholePlace, if the
// box is one run and whole stretches are aligned in all `arrays`, else with a Place.
template <int kStretch, class Visit, class... T>
__device__ __forceinline__ void each_stretch(const Box& box, const Visit& visit, T*... arrays) {
  const int64_t stretches = stretches_in_run(box, kStretch), total = stretches * box.runs;
  const int64_t thread = int64_t(blockIdx.x) * kThreads + threadIdx.x;
  int64_t i = thread, step = int64_t(gridDim.x) * kThreads;
  const uint64_t begin = (uint64_t(box.offset) + kStretch - 1) / kStretch * kStretch;
  const int64_t head = int64_t(begin) - box.offset, count = (box.run - head) / kStretch;
  if (box.runs == 1 && (aligned_to<sizeof(T) * kStretch>(arrays + head) && ...)) {
    for (; i < count; i += step) {
      visit(WholePlace{begin + uint64_t(i) * kStretch, head + i * kStretch});
    }
    // Of the stretches at the ends, thread 0 takes the first one and thread 1 the last one.
    i = thread == 0 && head > 0 ? 0 : thread == 1 ? count + (head > 0) : total;
    step = total;
  }
  for (; i < total; i += step) {
    const Place place = place_of<kStretch>(box, stretches, i);
    if (place.begin < place.end) visit(place);
  }
}

// Whether the whole stretch lies in the run, at an address that is aligned for packs.
template <class T, int kCount>
__device__ __forceinline__ bool whole(const T* x, const Place& place) {
  return place.begin == 0 && place.end == kCount && aligned_to<sizeof(T) * kCount>(x + place.at);
}

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> read(const T* x, const WholePlace& place) {
  return load_pack<Pack<T, kCount>>(x + place.at);
}

template <class T, int kCount>
__device__ __forceinline__ Pack<T, kCount> read(const T* x, const Place& place) {
  if (whole<T, kCount>(x, place)) return load_pack<Pack<T, kCount>>(x + place.at);
  Pack<T, kCount> values = {};
#pragma unroll
  for (int lane = 0; lane < kCount; ++lane) {
    if (lane >= place.begin && lane < place.end) values.value[lane] = x[place.at + lane];
  }
  return values;
}

template <class T, int kCount>
__device__ __forceinline__ void write(T* out, const WholePlace& place,
                                      const Pack<T, kCount>& values) {
  store_pack(out + place.at, values);
}

template <class T, int kCount>
__device__ __forceinline__ void write(T* out, const Place& place, const Pack<T, kCount>& values) {
  if (whole<T, kCount>(out, place)) return store_pack(out + place.at, values);
#pragma unroll
  for (int lane = 0; lane < kCount; ++lane) {
    if (lane >= place.begin && lane < place.end) out[place.at + lane] = values.value[lane];
  }
}

// A Draw with the round keys computed on the host.
struct KeyedDraw {
  RoundKeys keys;
  uint64_t counter;
  KeyedDraw(Draw draw) : keys(Seed{draw.seed}), counter(draw.counter) {}
};

// The random words of the elements of the stretch that begins at element `first`, in order.
template <class Word, int kCount>
struct Words {
  static constexpr int kPerBlock = 16 / int(sizeof(Word));
  Word word[kCount];
  __device__ __forceinline__ Words(const KeyedDraw& draw, uint64_t first) {
#pragma unroll
    for (int i = 0; i < kCount; i += kPerBlock) {
      const uint64_t block = (first + uint64_t(i)) / kPerBlock;
      uint32_t raw[4];
      philox(draw.keys, draw.counter, uint32_t(block), uint32_t(block >> 32), raw);
      memcpy(word + i, raw, sizeof(raw));
    }
  }
};

template <class F, class T>
__global__ void __launch_bounds__(kThreads) fill_kernel(T* out, F f, KeyedDraw draw, Box box) {
  using Word = typename F::Word;
  constexpr int kCount = kStretchOf<T, 16 / int(sizeof(Word))>;
  const auto fill = [&](const auto& place) {
    const Words<Word, kCount> words(draw, place.first);
    typename F::Value values[kCount];
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      f(words.word[i], words.word[i + 1], values[i], values[i + 1]);
    }
    write(out, place, rounded<T>(values));
  };
  each_stretch<kCount>(box, fill, out);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    bernoulli_kernel(T* out, const double* p, KeyedDraw draw, Box box) {
  constexpr int kCount = kStretchOf<T, 4>;
  const auto decide = [&](const auto& place) {
    const Pack<double, kCount> chances = read<double, kCount>(p, place);
    const Words<uint32_t, kCount> words(draw, place.first);
    Pack<T, kCount> values;
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      const double chance = chances.value[lane] * 0x1p32;
      values.value[lane] = Storage<T>::store(double(words.word[lane]) < chance ? 1 : 0);
    }
    write(out, place, values);
  };
  each_stretch<kCount>(box, decide, p, out);
}

template <class T>
__global__ void __launch_bounds__(kThreads)
    dropout_kernel(T* out, const T* x, Dropout dropout, KeyedDraw draw, Box box) {
  constexpr int kCount = kStretchOf<T, 4>;
  const Real<T> scale = Real<T>(dropout.scale);
  const auto drop = [&](const auto& place) {
    auto values = widened(read<T, kCount>(x, place));
    const Words<uint32_t, kCount> words(draw, place.first);
#pragma unroll
    for (int lane = 0; lane < kCount; ++lane) {
      values.value[lane] *= words.word[lane] <= dropout.last ? scale : Real<T>(0);
    }
    write(out, place, rounded<T>(values.value));
  };
  each_stretch<kCount>(box, drop, x, out);
}

unsigned grid_for(const Box& box, int stretch, int64_t most) {
  const int64_t threads = stretches_in_run(box, stretch) * box.runs;
  return unsigned(std::min<int64_t>((threads + kThreads - 1) / kThreads, most));
}

struct LaunchFill {
  void* out;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class F, class T>
  void operator()(F f, T) const {
    constexpr int kCount = kStretchOf<T, 16 / int(sizeof(typename F::Word))>;
    const unsigned grid = grid_for(box, kCount, kMostComputing);
    launch({grid, kThreads, 0, stream}, fill_kernel<F, T>, static_cast<T*>(out), f, draw, box);
  }
};

struct LaunchBernoulli {
  void* out;
  const double* p;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    const unsigned grid = grid_for(box, kStretchOf<T, 4>, kMostReading);
    launch({grid, kThreads, 0, stream}, bernoulli_kernel<T>, static_cast<T*>(out), p, draw, box);
  }
};

struct LaunchDropout {
  void* out;
  const void* x;
  Dropout dropout;
  Draw draw;
  const Box& box;
  cudaStream_t stream;
  template <class T>
  void operator()(T) const {
    const unsigned grid = grid_for(box, kStretchOf<T, 4>, kMostReading);
    launch({grid, kThreads, 0, stream}, dropout_kernel<T>, static_cast<T*>(out),
           static_cast<const T*>(x), dropout, draw, box);
  }
};

}  // namespace

void fill_cuda(void* out, Dtype dtype, Distribution distribution, Draw draw, const Box& box,
               void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit(dtype, distribution, LaunchFill{out, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void bernoulli_cuda(void* out, Dtype dtype, const double* p, Draw draw, const Box& box,
                    void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit_type(dtype, LaunchBernoulli{out, p, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void dropout_cuda(void* out, Dtype dtype, const void* x, Dropout dropout, Draw draw, const Box& box,
                  void* stream) {
  if (box.run == 0 || box.runs == 0) return;
  visit_float_type(dtype,
                   LaunchDropout{out, x, dropout, draw, box, static_cast<cudaStream_t>(stream)});
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent
