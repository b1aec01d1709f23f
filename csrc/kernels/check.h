// CONSISTENT_CHECK_CUDA throws std::runtime_error with file, line and CUDA's message if a CUDA call
// fails.

#pragma once

#include <cuda_runtime.h>

#include <stdexcept>
#include <string>

namespace consistent {

inline void check_cuda(cudaError_t error, const char* file, int line) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(file) + ":" + std::to_string(line) + ": " +
                           cudaGetErrorString(error));
}

}  // namespace consistent

#define CONSISTENT_CHECK_CUDA(call) ::consistent::check_cuda((call), __FILE__, __LINE__)
