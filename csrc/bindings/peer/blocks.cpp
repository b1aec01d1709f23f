// Registers csrc/peer/blocks.h as ops of torch, so that torch.compile can trace them.

#include "../../peer/blocks.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <torch/library.h>

#include <tuple>
#include <vector>

#include "../common.h"

namespace consistent::peer {
namespace {

using at::Tensor;

constexpr int64_t kBlocksOfAThread = 64;

Code code_of(c10::string_view name) {
  TORCH_CHECK(name == "int8" || name == "fp8", "a code is int8 or fp8, not ", name);
  return name == "int8" ? Code::int8 : Code::fp8;
}

Tensor new_message(const Tensor& x) {
  return at::empty({bytes_of(x.numel())}, x.options().dtype(at::kByte));
}

// Returns the message of `x`, or of `x + unsent`, and its rounding error, or an empty tensor if
// there is no `unsent`.
std::tuple<Tensor, Tensor> write(const Tensor& x, const std::optional<Tensor>& unsent,
                                 c10::string_view code) {
  const Code as = code_of(code);
  const Dtype dtype = float_dtype_of("write_blocks", "x", x);
  const Tensor from = dense(x), message = new_message(x);
  Tensor rest = at::empty({0}, x.options());
  if (unsent) {
    const at::ScalarType wide = wide_type(x.scalar_type());
    TORCH_CHECK(unsent->scalar_type() == wide && unsent->sizes() == x.sizes(),
                "write_blocks: x is ", x.scalar_type(), x.sizes(), " and unsent ",
                unsent->scalar_type(), unsent->sizes(), ", not ", wide, x.sizes());
    rest = unsent->clone(at::MemoryFormat::Contiguous);
  }
  const int64_t n = x.numel();
  auto* to = message.mutable_data_ptr<uint8_t>();
  const void* numbers = from.const_data_ptr();
  void* left = unsent ? rest.mutable_data_ptr() : nullptr;
  launch_over(
      message, blocks_of(n), kBlocksOfAThread,
      [&](int64_t begin, int64_t end) {
        write_blocks(to, numbers, left, dtype, n, as, begin, end);
      },
      [&](void* stream) { write_blocks_cuda(to, numbers, left, dtype, n, as, stream); });
  return {message, rest};
}

std::tuple<Tensor, Tensor> write_meta(const Tensor& x, const std::optional<Tensor>& unsent,
                                      c10::string_view) {
  return {new_message(x), unsent ? at::empty_like(*unsent, at::MemoryFormat::Contiguous)
                                 : at::empty({0}, x.options())};
}

Tensor new_numbers(at::TensorList messages, int64_t n, at::ScalarType dtype) {
  TORCH_CHECK(!messages.empty(), "read_blocks: no message was given");
  return at::empty({n}, messages[0].options().dtype(dtype));
}

// Adds any number of messages by launches of kMostMessages each. The sums in between are unrounded.
void read_on_gpu(const Tensor& out, const std::vector<const uint8_t*>& from, int64_t n, Code code,
                 void* stream) {
  Tensor before, made;
  for (size_t k = 0; k < from.size(); k += kMostMessages) {
    const size_t count = std::min(from.size() - k, size_t(kMostMessages));
    const bool is_last = k + count == from.size();
    made = is_last ? out : at::empty({n}, out.options().dtype(wide_type(out.scalar_type())));
    read_blocks_cuda(made.mutable_data_ptr(), data_of(before), from.data() + k, int(count),
                     float_dtype_of("read_blocks", "the result", made), n, code, stream);
    before = made;
  }
}

// The sum of messages of `n` numbers each, in their order.
Tensor read(at::TensorList messages, int64_t n, at::ScalarType dtype, c10::string_view code) {
  const Code as = code_of(code);
  const Tensor out = new_numbers(messages, n, dtype);
  const Dtype to = float_dtype_of("read_blocks", "the result", out);
  std::vector<Tensor> kept;
  std::vector<const uint8_t*> from;
  for (const Tensor& message : messages) {
    TORCH_CHECK(message.scalar_type() == at::kByte && message.numel() == bytes_of(n),
                "read_blocks: a message of ", n, " numbers is ", bytes_of(n), " bytes, not ",
                message.numel(), " of ", message.scalar_type());
    kept.push_back(dense(message));
    from.push_back(kept.back().const_data_ptr<uint8_t>());
  }
  void* made = out.mutable_data_ptr();
  launch_over(
      out, blocks_of(n), kBlocksOfAThread,
      [&](int64_t begin, int64_t end) {
        read_blocks(made, from.data(), int(from.size()), to, n, as, begin, end);
      },
      [&](void* stream) { read_on_gpu(out, from, n, as, stream); });
  return out;
}

Tensor read_meta(at::TensorList messages, int64_t n, at::ScalarType dtype, c10::string_view) {
  return new_numbers(messages, n, dtype);
}

}  // namespace

TORCH_LIBRARY(mirrored, m) {
  m.def("write_blocks(Tensor x, Tensor? unsent, str code) -> (Tensor, Tensor)");
  m.def("read_blocks(Tensor[] messages, int n, ScalarType dtype, str code) -> Tensor");
}

TORCH_LIBRARY_IMPL(mirrored, CPU, m) {
  m.impl("write_blocks", &write);
  m.impl("read_blocks", &read);
}

#ifdef CONSISTENT_WITH_CUDA
TORCH_LIBRARY_IMPL(mirrored, CUDA, m) {
  m.impl("write_blocks", &write);
  m.impl("read_blocks", &read);
}
#endif

TORCH_LIBRARY_IMPL(mirrored, Meta, m) {
  m.impl("write_blocks", &write_meta);
  m.impl("read_blocks", &read_meta);
}

}  // namespace consistent::peer
