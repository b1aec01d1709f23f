// Registers csrc/kernels/streamed_copy.h as an op of torch.

#include "../kernels/streamed_copy.h"

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include "common.h"

namespace consistent {
namespace {

using at::Tensor;

void streamed_copy_(const Tensor& self, const Tensor& source) {
  const char* op = "streamed_copy_";
  check_strided(op, "self", self);
  check_strided(op, "source", source);
  TORCH_CHECK(self.is_cpu() && source.is_cpu(), op, ": self is on ", self.device(),
              " and source on ", source.device(),
              ", and memory of the CPU is copied; use self.copy_(source).");
  TORCH_CHECK(
      self.scalar_type() == source.scalar_type() && self.sizes() == source.sizes() &&
          self.is_contiguous() && source.is_contiguous() && self.is_neg() == source.is_neg() &&
          self.is_conj() == source.is_conj(),
      op, ": self is ", self.scalar_type(), " ", self.sizes(), " and source ", source.scalar_type(),
      " ", source.sizes(),
      ", and the bytes of one contiguous tensor are copied to another of its dtype and shape; use "
      "self.copy_(source).");
  streamed_copy(self.data_ptr(), source.const_data_ptr(), int64_t(self.nbytes()));
}

TORCH_LIBRARY_IMPL(consistent, CPU, m) { m.impl("streamed_copy_", streamed_copy_); }

}  // namespace
}  // namespace consistent
