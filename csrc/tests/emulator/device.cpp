// The device of the emulator: its memory, its limits, and a list of the kernels that ran.

#include <cstdio>
#include <map>

#include "cuda_runtime.h"

extern const char __executable_start[];  // of the linker

namespace emulator {
namespace {

constexpr size_t kUnasked = 48 << 10;  // dynamic shared memory that each kernel may have

// A block's shared memory on an H100, unless the environment names that of another GPU.
size_t most_shared() {
  const char* const given = getenv("EMULATED_SHARED_BYTES");
  return given ? size_t(atoll(given)) : size_t(227 << 10);
}

struct Device {
  cudaError_t last = cudaSuccess;
  std::map<const void*, size_t> allowed;  // kernel -> dynamic shared memory
  std::map<const void*, long> blocks;     // kernel -> blocks that ran

  // The list is for tests: offset in the program and count of blocks, one kernel a line.
  ~Device() {
    const char* const path = getenv("EMULATED_KERNELS");
    FILE* const file = path ? fopen(path, "w") : nullptr;
    if (file == nullptr) return;
    for (const auto& [kernel, count] : blocks) {
      fprintf(file, "%zx %ld\n", size_t(static_cast<const char*>(kernel) - __executable_start),
              count);
    }
    fclose(file);
  }
} device;

}  // namespace

bool note_launch(const Grid& grid) {
  const auto [x, y, z] = grid.blocks;
  const auto allowed = device.allowed.find(grid.kernel);
  const size_t most = allowed == device.allowed.end() ? kUnasked : allowed->second;
  const bool right = x > 0 && x < 1u << 31 && y > 0 && y <= 65535 && z == 1 && grid.threads > 0 &&
                     grid.threads <= 1024 && grid.shared_bytes <= most;
  if (!right) device.last = cudaErrorInvalidValue;
  if (right) device.blocks[grid.kernel] += long(x) * y;
  return right;
}

cudaError_t allow_shared(const void* kernel, int bytes) {
  if (bytes < 0 || size_t(bytes) > most_shared()) return device.last = cudaErrorInvalidValue;
  device.allowed[kernel] = size_t(bytes);
  return cudaSuccess;
}

}  // namespace emulator

cudaError_t cudaGetLastError() {
  const cudaError_t last = emulator::device.last;
  emulator::device.last = cudaSuccess;
  return last;
}

const char* cudaGetErrorString(cudaError_t error) {
  return error == cudaErrorInvalidValue ? "invalid argument" : "out of memory";
}

cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr, int) {
  *value = int(emulator::most_shared());
  return cudaSuccess;
}

cudaError_t cudaMalloc(void** made, size_t bytes) {
  if (posix_memalign(made, 256, bytes) != 0) return cudaErrorMemoryAllocation;
  memset(*made, 0xA5, bytes);
  return cudaSuccess;
}

cudaError_t cudaFree(void* memory) {
  free(memory);
  return cudaSuccess;
}
