// The current CUDA stream, for a launcher; null in a build without CUDA, whose launchers throw.

#pragma once

#include <c10/core/Device.h>

#ifdef CONSISTENT_WITH_CUDA

#include <c10/cuda/CUDAStream.h>

namespace consistent {
inline void* current_stream(c10::Device device) {
  return c10::cuda::getCurrentCUDAStream(device.index()).stream();
}
}  // namespace consistent

#else

namespace consistent {
inline void* current_stream(c10::Device) { return nullptr; }
}  // namespace consistent

#endif
