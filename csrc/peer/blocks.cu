// The messages of blocks.h on a GPU.
//
//   write, for each block of 256 numbers:  // R: float32, or float64 for float64 numbers
//     for i in block: t[i] = R(x[i]);  if unsent: t[i] = t[i] + unsent[i]
//     scale = max(|float(t[i])|) / most  // most: 127 or 448; NaN if the quotient is not finite
//     for i in block: q = clamp(float(t[i]) / (scale == 0 ? 1 : scale), -most, most)
//       byte[i] = scale is NaN ? 0 : code(q)  // to nearest, ties to even
//       if unsent: u = t[i] - R(number(byte[i]) * scale);  unsent[i] = finite(u) ? u : 0
//   read, for i in 0 .. n - 1:  // number(byte) * scale is in float32
//     t = R(number(message[0][i]) * scale[0]);  if before: t = before[i] + t
//     for k in 1 .. count - 1: t = t + R(number(message[k][i]) * scale[k])
//     out[i] = T(t)
//
// A warp takes a block of 256 numbers, and each lane eight of them, which it reads once. Lanes move
// 16 bytes of numbers at a time where all addresses are aligned, and the bytes of a message eight
// or four at a time.

#include <algorithm>
#include <type_traits>

#include "../kernels/block.cuh"
#include "../kernels/check.h"
#include "../kernels/launch.cuh"
#include "../kernels/vector.cuh"
#include "blocks.h"

namespace consistent::peer {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kEach = int(kNumbers) / kWarp;  // numbers of a lane
constexpr int kBytes = 4;                     // bytes of a message moved at once, if not kEach
constexpr int64_t kMostBlocks = most_blocks(4096);

// A kernel parameter, so the pointers need no copy to device memory.
struct Messages {
  const uint8_t* at[kMostMessages];
  int count;
};

// Where a lane's numbers begin, and how many it has: fewer than kEach at the end of the message.
struct Lane {
  int64_t first;
  int count;
  __device__ __forceinline__ Lane(int64_t block, int64_t n) {
    first = block * kNumbers + int64_t(threadIdx.x % kWarp) * kEach;
    const int64_t left = n - first;
    count = int(left < 0 ? 0 : left < kEach ? left : kEach);
  }
};

// Calls visit(block) for each block of this warp. `block` is the same for the whole warp, so all
// lanes reach the warp's reductions inside visit.
template <class Visit>
__device__ __forceinline__ void each_block(int64_t n, const Visit& visit) {
  const int64_t blocks = blocks_of(n), step = int64_t(gridDim.x) * kWarps;
  for (int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; block < blocks;
       block += step) {
    visit(block);
  }
}

template <class T>
__device__ __forceinline__ void load(Real<T> (&to)[kEach], const T* from, const Lane& lane,
                                     bool packs) {
  if (packs && lane.count == kEach) {
    const auto pack = load_pack<Pack<T, kEach>>(from + lane.first);
#pragma unroll
    for (int i = 0; i < kEach; ++i) to[i] = Storage<T>::load(pack.value[i]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    to[i] = i < lane.count ? Storage<T>::load(from[lane.first + i]) : Real<T>(0);
  }
}

template <class T>
__device__ __forceinline__ void store(T* to, const Real<T> (&from)[kEach], const Lane& lane,
                                      bool packs) {
  if (packs && lane.count == kEach) {
    store_pack(to + lane.first, rounded<T>(from));
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < lane.count) to[lane.first + i] = Storage<T>::store(from[i]);
  }
}

// Calls run(constant), where decltype(constant)::value is how many bytes of a message are moved at
// once: `most`, which the message's address allows, or 1 for a lane with fewer than kEach numbers.
template <class Run>
__device__ __forceinline__ void with_width(int most, const Lane& lane, const Run& run) {
  if (lane.count < kEach || most == 1) return run(std::integral_constant<int, 1>());
  if (most == kEach) return run(std::integral_constant<int, kEach>());
  run(std::integral_constant<int, kBytes>());
}

template <int kCount>
__device__ __forceinline__ void load_bytes(uint8_t (&to)[kEach], const uint8_t* numbers,
                                           const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kEach; i += kCount) {
    if (kCount == 1 && i >= lane.count) break;
    const auto pack = load_pack<Pack<uint8_t, kCount>>(numbers + lane.first + i);
#pragma unroll
    for (int j = 0; j < kCount; ++j) to[i + j] = pack.value[j];
  }
}

template <int kCount>
__device__ __forceinline__ void store_bytes(uint8_t* numbers, const uint8_t (&from)[kEach],
                                            const Lane& lane) {
#pragma unroll
  for (int i = 0; i < kEach; i += kCount) {
    if (kCount == 1 && i >= lane.count) break;
    Pack<uint8_t, kCount> pack;
#pragma unroll
    for (int j = 0; j < kCount; ++j) pack.value[j] = from[i + j];
    store_pack(numbers + lane.first + i, pack);
  }
}

// The number that a byte stands for.
template <Code kCode>
__device__ __forceinline__ float said(uint8_t byte, float scale) {
  return kCode == Code::int8 ? from_int8(byte, scale) : from_fp8(byte, scale);
}

// Calls run(constant), where decltype(constant)::value is the code.
template <class Run>
__device__ __forceinline__ void with_code(Code code, const Run& run) {
  if (code == Code::int8) return run(std::integral_constant<Code, Code::int8>());
  run(std::integral_constant<Code, Code::fp8>());
}

// The scale of a block, read byte by byte if the message is not known to be aligned (kCount 1).
template <int kCount>
__device__ __forceinline__ float scale_at(const uint8_t* message, int64_t block) {
  const uint8_t* at = message + block * int64_t(sizeof(float));
  if (kCount > 1) return *reinterpret_cast<const float*>(at);
  uint32_t word = 0;
#pragma unroll
  for (int i = 0; i < int(sizeof(float)); ++i) word |= uint32_t(at[i]) << (8 * i);
  return bits_as<float>(word);
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#if defined(__CUDACC__) && defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  return __reduce_max_sync(0xFFFFFFFFu, value);
#else
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
    value = other > value ? other : value;
  }
  return value;
#endif
}

// Encodes a lane's numbers as bytes. With the reciprocal of the scale (see quotient()) there is one
// division per lane and not eight.
template <class R>
__device__ __forceinline__ void coded(uint8_t (&bytes)[kEach], const R (&numbers)[kEach],
                                      float scale, Code code) {
  const float by = divisor_of(scale);
  if (has_reciprocal(by)) {
    const float reciprocal = 1.0f / by;
    if (code == Code::int8) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        bytes[i] = to_int8(quotient(float(numbers[i]), by, reciprocal));
      }
    } else {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const float x = float(numbers[i]);
        bytes[i] = to_fp8(copysignf(quotient(x, by, reciprocal), x));
      }
    }
    return;
  }
  const bool finite = scale == scale;
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    const float exact = clamped(float(numbers[i]) / by, most_of(code));
    const uint8_t byte = code == Code::int8 ? to_int8(exact) : to_fp8(exact);
    bytes[i] = finite ? byte : uint8_t(0);
  }
}

// `packs`: x and unsent are aligned to 16 bytes. `message` is a new tensor and so always aligned.
template <class T>
__global__ void __launch_bounds__(kThreads)
    write_kernel(uint8_t* message, const T* x, Real<T>* unsent, int64_t n, Code code, bool packs) {
  using R = Real<T>;
  uint8_t* numbers = message + int64_t(sizeof(float)) * blocks_of(n);
  each_block(n, [&](int64_t block) {
    const Lane lane(block, n);
    R total[kEach];
    load(total, x, lane, packs);
    if (unsent != nullptr) {
      R more[kEach];
      load(more, static_cast<const R*>(unsent), lane, packs);
#pragma unroll
      for (int i = 0; i < kEach; ++i) total[i] += more[i];
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t bits = magnitude_of(float(total[i]));
      most = bits > most ? bits : most;
    }
    // Magnitudes are compared as integers, in which a NaN is the largest, so it is not lost.
    const float scale = scale_of(largest_of_warp(most), code);
    uint8_t bytes[kEach];
    coded(bytes, total, scale, code);
    with_width(aligned_to<kEach>(numbers) ? kEach : kBytes, lane,
               [&](auto width) { store_bytes<decltype(width)::value>(numbers, bytes, lane); });
    if (threadIdx.x % kWarp == 0) {
      reinterpret_cast<float*>(message)[block] = scale;
    }
    if (unsent == nullptr) return;
    with_code(code, [&](auto constant) {
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        total[i] = left_of(total[i], R(said<decltype(constant)::value>(bytes[i], scale)));
      }
    });
    store(unsent, total, lane, packs);
  });
}

// Adds the messages' numbers of this lane to `total`, in order. If `begins`, the first message
// initializes `total`.
template <Code kCode, int kCount, class R>
__device__ __forceinline__ void add_messages(R (&total)[kEach], bool begins,
                                             const Messages& messages, int64_t block,
                                             int64_t blocks, const Lane& lane) {
#pragma unroll 4
  for (int k = 0; k < messages.count; ++k) {
    const uint8_t* message = messages.at[k];
    const float scale = scale_at<kCount>(message, block);
    uint8_t bytes[kEach] = {};
    load_bytes<kCount>(bytes, message + int64_t(sizeof(float)) * blocks, lane);
    const bool is_first = k == 0 && begins;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const R number = R(said<kCode>(bytes[i], scale));
      total[i] = is_first ? number : total[i] + number;
    }
  }
}

// `packs`: out and before are aligned to 16 bytes. `width`: the bytes of a message moved at once.
template <class T>
__global__ void __launch_bounds__(kThreads)
    read_kernel(T* out, const Real<T>* before, const __grid_constant__ Messages messages, int64_t n,
                Code code, bool packs, int width) {
  const int64_t blocks = blocks_of(n);
  const bool begins = before == nullptr;
  each_block(n, [&](int64_t block) {
    const Lane lane(block, n);
    Real<T> total[kEach];
    if (!begins) load(total, before, lane, packs);
    with_code(code, [&](auto constant) {
      with_width(width, lane, [&](auto count) {
        add_messages<decltype(constant)::value, decltype(count)::value>(total, begins, messages,
                                                                        block, blocks, lane);
      });
    });
    store(out, total, lane, packs);
  });
}

Grid grid_for(int64_t n, void* stream) {
  const int64_t blocks = (blocks_of(n) + kWarps - 1) / kWarps;
  return {unsigned(std::min(blocks, kMostBlocks)), kThreads, 0, static_cast<cudaStream_t>(stream)};
}

}  // namespace

void write_blocks_cuda(uint8_t* message, const void* x, void* unsent, Dtype dtype, int64_t n,
                       Code code, void* stream) {
  if (n == 0) return;
  const bool packs = aligned_to<16>(x) && aligned_to<16>(unsent);
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    launch(grid_for(n, stream), write_kernel<T>, message, static_cast<const T*>(x),
           static_cast<Real<T>*>(unsent), n, code, packs);
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void read_blocks_cuda(void* out, const void* before, const uint8_t* const* messages, int count,
                      Dtype dtype, int64_t n, Code code, void* stream) {
  if (n == 0) return;
  Messages given{{}, count};
  const bool packs = aligned_to<16>(out) && aligned_to<16>(before);
  int width = kEach;
  for (int k = 0; k < count; ++k) {
    given.at[k] = messages[k];
    if (!aligned_to<kEach>(messages[k] + int64_t(sizeof(float)) * blocks_of(n))) {
      width = std::min(width, aligned_to<kBytes>(messages[k]) ? kBytes : 1);
    }
  }
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    launch(grid_for(n, stream), read_kernel<T>, static_cast<T*>(out),
           static_cast<const Real<T>*>(before), given, n, code, packs, width);
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent::peer
