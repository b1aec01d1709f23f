// A stand-in for CUDA's header with which the compiler of the CPU compiles .cu files and runs their
// kernels (block.h), to be included before all else as nvcc does with its own. It has what the
// sources in this project use. docs/gpu.md says what it cannot show.

#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "block.h"

#define __CUDA_ARCH__ 900  // what a source does on the device only is done here too
#define __global__ __attribute__((noinline))
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static  // blocks run one after the other

struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

enum cudaError_t { cudaSuccess, cudaErrorInvalidValue, cudaErrorMemoryAllocation };
using cudaStream_t = void*;
struct EmulatedEvent {};
using cudaEvent_t = EmulatedEvent*;
enum cudaMemcpyKind { cudaMemcpyHostToDevice, cudaMemcpyDeviceToHost, cudaMemcpyDeviceToDevice };
enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
enum cudaDeviceAttr { cudaDevAttrMaxSharedMemoryPerBlockOptin };

namespace emulator {

// Notes the kernel for the list of those that ran, and whether CUDA would accept the launch.
bool note_launch(const Grid& grid);
cudaError_t allow_shared(const void* kernel, int bytes);

}  // namespace emulator

cudaError_t cudaGetLastError();
const char* cudaGetErrorString(cudaError_t error);
cudaError_t cudaGetDevice(int* device);
cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr attribute, int device);

// Memory as CUDA aligns it, full of bytes that are not 0.
cudaError_t cudaMalloc(void** made, size_t bytes);
cudaError_t cudaFree(void* memory);

template <class... Wanted>
cudaError_t cudaFuncSetAttribute(void (*kernel)(Wanted...), cudaFuncAttribute, int bytes) {
  return emulator::allow_shared(reinterpret_cast<const void*>(kernel), bytes);
}

// Every call waits for its end, so streams and events have nothing to do.
inline cudaError_t cudaMemcpy(void* to, const void* from, size_t bytes, cudaMemcpyKind) {
  if (bytes != 0) memcpy(to, from, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemcpyAsync(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) {
  return cudaMemcpy(to, from, bytes, kind);
}
inline cudaError_t cudaMemset(void* to, int value, size_t bytes) {
  if (bytes != 0) memset(to, value, bytes);
  return cudaSuccess;
}
inline cudaError_t cudaMemsetAsync(void* to, int value, size_t bytes, cudaStream_t = nullptr) {
  return cudaMemset(to, value, bytes);
}
inline cudaError_t cudaEventCreate(cudaEvent_t*) { return cudaSuccess; }
inline cudaError_t cudaEventRecord(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
inline cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) {
  *ms = 1;  // not a time: the programs take none here
  return cudaSuccess;
}

inline uint64_t __umul64hi(uint64_t a, uint64_t b) {
  return uint64_t((static_cast<unsigned __int128>(a) * b) >> 64);
}

// The lowest bit that is set, counted from 1, 0 if there is none; and how many are set.
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }

// What the GPU computes with an instruction of its own, here with all its bits.
inline float __fdividef(float a, float b) {
  return std::fabs(b) > 0x1p126f && std::fabs(b) <= 0x1p127f * 1.99999988f ? a * 0.0f : a / b;
}
