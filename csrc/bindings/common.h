// Helpers of the bindings of floating-point kernels: dtypes, checks, launches.

#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>

#include "../kernels/storage.h"
#include "stream.h"

namespace consistent {

inline Dtype float_dtype_of(const char* op, const char* name, const at::Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return Dtype::f32;
    case at::kDouble:
      return Dtype::f64;
    case at::kHalf:
      return Dtype::f16;
    case at::kBFloat16:
      return Dtype::bf16;
    default:
      TORCH_CHECK(false, op, ": ", name, " is ", x.scalar_type(),
                  ", and this is computed for float16, bfloat16, float32 and float64 only; convert "
                  "it with .to(torch.float32).");
  }
}

// The dtype in which sums over tensors of `dtype` are kept.
inline at::ScalarType wide_type(at::ScalarType dtype) {
  return dtype == at::kDouble ? at::kDouble : at::kFloat;
}

inline void check_strided(const char* op, const char* name, const at::Tensor& x) {
  TORCH_CHECK(x.layout() == at::kStrided, op, ": ", name, " is ", x.layout(),
              ", and its elements are read in order; call .to_dense() first.");
}

inline void check_same_device(const char* op, const char* name, const at::Tensor& x,
                              const at::Tensor& as) {
  TORCH_CHECK(x.device() == as.device(), op, ": ", name, " is on ", x.device(),
              " and the first tensor on ", as.device(),
              ", and one kernel reads both; move it with .to(device).");
}

// The tensor's values in contiguous memory, with a lazy negation (is_neg) materialized.
inline at::Tensor dense(const at::Tensor& x) { return x.resolve_neg().contiguous(); }

// The data of an optional tensor; null if it is undefined.
inline const void* data_of(const at::Tensor& x) {
  return x.defined() ? x.const_data_ptr() : nullptr;
}

// For a CPU tensor, calls on_cpu(begin, end) from several threads for ranges of [0, count) of
// `grain` or more items; for a CUDA tensor, on_cuda(stream) with the tensor's device current.
template <class OnCpu, class OnCuda>
void launch_over(const at::Tensor& out, int64_t count, int64_t grain, const OnCpu& on_cpu,
                 const OnCuda& on_cuda) {
  if (count == 0) return;
  if (out.is_cpu()) return at::parallel_for(0, count, std::max<int64_t>(1, grain), on_cpu);
  const c10::DeviceGuard guard(out.device());
  on_cuda(current_stream(out.device()));
}

constexpr int64_t kWorthAThread = 1 << 15;  // elements for which another thread pays

}  // namespace consistent
