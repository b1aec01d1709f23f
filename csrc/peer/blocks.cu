// The messages of blocks.h on a GPU. A warp has a block of 256 numbers, and each lane eight of
// them, which it reads once:
//
//   scale = largest |x| of the warp / 127;   byte = round(x / scale);   unsent = x - byte * scale
//
// Lanes move 16 bytes at a time where all addresses allow it, and bytes of a message four at a
// time.

#include <algorithm>

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
constexpr int kBytes = 4;                     // of a message that are moved at once
constexpr int64_t kMostBlocks = most_blocks(4096);

struct Messages {
  const uint8_t* at[kMostMessages];
  int count;
};

// Where a lane's numbers begin, and how many of the message's are left for it.
struct Lane {
  int64_t first;
  int count;
  __device__ __forceinline__ Lane(int64_t block, int64_t n) {
    first = block * kNumbers + int64_t(threadIdx.x % kWarp) * kEach;
    const int64_t left = n - first;
    count = int(left < 0 ? 0 : left < kEach ? left : kEach);
  }
};

// Calls visit(block) for each block of this warp.
template <class Visit>
__device__ __forceinline__ void each_block(int64_t n, const Visit& visit) {
  const int64_t blocks = blocks_of(n), step = int64_t(gridDim.x) * kWarps;
  for (int64_t block = int64_t(blockIdx.x) * kWarps + threadIdx.x / kWarp; block < blocks;
       block += step) {
    visit(block);
  }
}

template <class T>
__device__ __forceinline__ void load(Real<T>* to, const T* from, const Lane& lane, bool packs) {
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
__device__ __forceinline__ void store(T* to, const Real<T>* from, const Lane& lane, bool packs) {
  if (packs && lane.count == kEach) {
    Pack<T, kEach> pack;
#pragma unroll
    for (int i = 0; i < kEach; ++i) pack.value[i] = Storage<T>::store(from[i]);
    store_pack(to + lane.first, pack);
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < lane.count) to[lane.first + i] = Storage<T>::store(from[i]);
  }
}

using Bytes = Pack<uint8_t, kBytes>;

__device__ __forceinline__ void load_bytes(uint8_t* to, const uint8_t* from, const Lane& lane,
                                           bool packs) {
  if (packs && lane.count == kEach) {
#pragma unroll
    for (int i = 0; i < kEach; i += kBytes) {
      const Bytes pack = load_pack<Bytes>(from + lane.first + i);
#pragma unroll
      for (int j = 0; j < kBytes; ++j) to[i + j] = pack.value[j];
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) to[i] = i < lane.count ? from[lane.first + i] : uint8_t(0);
}

__device__ __forceinline__ void store_bytes(uint8_t* to, const uint8_t* from, const Lane& lane,
                                            bool packs) {
  if (packs && lane.count == kEach) {
#pragma unroll
    for (int i = 0; i < kEach; i += kBytes) {
      Bytes pack;
#pragma unroll
      for (int j = 0; j < kBytes; ++j) pack.value[j] = from[i + j];
      store_pack(to + lane.first + i, pack);
    }
    return;
  }
#pragma unroll
  for (int i = 0; i < kEach; ++i) {
    if (i < lane.count) to[lane.first + i] = from[i];
  }
}

__device__ __forceinline__ float said_by(uint8_t byte, float scale, Code code) {
  return code == Code::int8 ? from_int8(byte, scale) : from_fp8(byte, scale);
}

// The scales of a message lie before its numbers, and it may begin at any byte.
__device__ __forceinline__ float scale_at(const uint8_t* message, int64_t block) {
  uint32_t word = 0;
  const uint8_t* at = message + block * int64_t(sizeof(float));
#pragma unroll
  for (int i = 0; i < int(sizeof(float)); ++i) word |= uint32_t(at[i]) << (8 * i);
  return bits_as<float>(word);
}

__device__ __forceinline__ uint32_t largest_of_warp(uint32_t value) {
#pragma unroll
  for (int step = kWarp / 2; step > 0; step /= 2) {
    const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
    value = other > value ? other : value;
  }
  return value;
}

// `packs`: x and unsent are aligned to 16 bytes. A new message is.
template <class T>
__global__ void __launch_bounds__(kThreads)
    write_kernel(uint8_t* message, const T* x, T* unsent, int64_t n, Code code, bool packs) {
  using R = Real<T>;
  uint8_t* numbers = message + int64_t(sizeof(float)) * blocks_of(n);
  each_block(n, [&](int64_t block) {
    const Lane lane(block, n);
    R total[kEach];
    load(total, x, lane, packs);
    if (unsent != nullptr) {
      R more[kEach];
      load(more, static_cast<const T*>(unsent), lane, packs);
#pragma unroll
      for (int i = 0; i < kEach; ++i) total[i] += more[i];
    }
    uint32_t most = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const uint32_t bits = magnitude_of(float(total[i]));
      most = bits > most ? bits : most;
    }
    const float scale = scale_of(largest_of_warp(most), code), by = divisor_of(scale);
    const bool finite = scale == scale;
    uint8_t bytes[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      const float number = float(total[i]);
      const uint8_t byte = code == Code::int8 ? to_int8(number, by) : to_fp8(number, by);
      bytes[i] = finite ? byte : uint8_t(0);
    }
    store_bytes(numbers, bytes, lane, true);
    if (threadIdx.x % kWarp == 0) {
      reinterpret_cast<float*>(message)[block] = scale;
    }
    if (unsent == nullptr) return;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
      total[i] = left_of(total[i], R(said_by(bytes[i], scale, code)));
    }
    store(unsent, total, lane, packs);
  });
}

// `packs`: all messages are aligned to their packs, out and before to 16 bytes.
template <class T>
__global__ void __launch_bounds__(kThreads)
    read_kernel(T* out, const Real<T>* before, const __grid_constant__ Messages messages, int64_t n,
                Code code, bool packs) {
  using R = Real<T>;
  each_block(n, [&](int64_t block) {
    const Lane lane(block, n);
    R total[kEach];
    if (before != nullptr) load(total, before, lane, packs);
    for (int k = 0; k < messages.count; ++k) {
      const uint8_t* message = messages.at[k];
      const float scale = scale_at(message, block);
      uint8_t bytes[kEach];
      load_bytes(bytes, message + int64_t(sizeof(float)) * blocks_of(n), lane, packs);
      const bool is_first = k == 0 && before == nullptr;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const R said = R(said_by(bytes[i], scale, code));
        total[i] = is_first ? said : total[i] + said;
      }
    }
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
           static_cast<T*>(unsent), n, code, packs);
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

void read_blocks_cuda(void* out, const void* before, const uint8_t* const* messages, int count,
                      Dtype dtype, int64_t n, Code code, void* stream) {
  if (n == 0) return;
  Messages given{{}, count};
  bool packs = aligned_to<16>(out) && aligned_to<16>(before);
  for (int k = 0; k < count; ++k) {
    given.at[k] = messages[k];
    packs = packs && aligned_to<kBytes>(messages[k]);
  }
  visit_float_type(dtype, [&](auto of) {
    using T = decltype(of);
    launch(grid_for(n, stream), read_kernel<T>, static_cast<T*>(out),
           static_cast<const Real<T>*>(before), given, n, code, packs);
  });
  CONSISTENT_CHECK_CUDA(cudaGetLastError());
}

}  // namespace consistent::peer
