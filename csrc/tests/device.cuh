// Device memory and the timing of kernels, for the programs in this folder.

#pragma once

#include <cstdio>
#include <vector>

#include "../kernels/check.h"

namespace consistent {

// Device memory. `data` begins `skew` bytes after the allocated address, which is aligned for all
// types.
struct DeviceBytes {
  void *memory = nullptr, *data = nullptr;
  explicit DeviceBytes(size_t size, size_t skew = 0) {
    CONSISTENT_CHECK_CUDA(cudaMalloc(&memory, size + skew ? size + skew : 1));
    data = static_cast<char*>(memory) + skew;
  }
  explicit DeviceBytes(const void* from, size_t size, size_t skew = 0) : DeviceBytes(size, skew) {
    CONSISTENT_CHECK_CUDA(cudaMemcpy(data, from, size, cudaMemcpyHostToDevice));
  }
  DeviceBytes(const DeviceBytes&) = delete;
  DeviceBytes(DeviceBytes&& other) : memory(other.memory), data(other.data) {
    other.memory = nullptr;
  }
  ~DeviceBytes() { cudaFree(memory); }

  std::vector<char> back(size_t size) const {
    std::vector<char> here(size);
    CONSISTENT_CHECK_CUDA(cudaMemcpy(here.data(), data, size, cudaMemcpyDeviceToHost));
    return here;
  }
};

// Prints the time and bandwidth of the fastest of several runs; returns the bandwidth in GB/s.
template <class Run>
double time_of(const char* name, int64_t bytes, const Run& run) {
  cudaEvent_t start, stop;
  CONSISTENT_CHECK_CUDA(cudaEventCreate(&start));
  CONSISTENT_CHECK_CUDA(cudaEventCreate(&stop));
  float best = 1e9f;
  for (int i = 0; i < 20; ++i) {
    CONSISTENT_CHECK_CUDA(cudaEventRecord(start));
    run();
    CONSISTENT_CHECK_CUDA(cudaEventRecord(stop));
    CONSISTENT_CHECK_CUDA(cudaEventSynchronize(stop));
    float ms = 0;
    CONSISTENT_CHECK_CUDA(cudaEventElapsedTime(&ms, start, stop));
    best = ms < best ? ms : best;
  }
  const double speed = double(bytes) / best * 1e-6;
  printf("%-28s %8.3f ms  %6.0f GB/s\n", name, best, speed);
  return speed;
}

// The same, in percent of the bandwidth of a copy that moves the same number of bytes (half of them
// read, half written).
template <class Run>
void time_beside_copy(const char* name, int64_t bytes, const Run& run) {
  const DeviceBytes from{size_t(bytes / 2)}, to{size_t(bytes / 2)};
  const double copy = time_of("copy", bytes, [&] {
    cudaMemcpyAsync(to.data, from.data, size_t(bytes / 2), cudaMemcpyDeviceToDevice);
  });
  printf("%-28s %7.1f %% of it\n", name, 100 * time_of(name, bytes, run) / copy);
}

}  // namespace consistent
