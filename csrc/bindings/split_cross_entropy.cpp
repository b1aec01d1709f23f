// Registers csrc/kernels/split_cross_entropy.h as ops of torch. Autograd is in Python
// (consistent/forms/families/reductions/): between the statistics of a rank's logits and the
// gradient of these logits the ranks communicate.

#include "../kernels/split_cross_entropy.h"

#include <torch/library.h>

#include "common.h"

namespace consistent {
namespace {

using at::Tensor;

ClassSplit split_of(const char* op, const Tensor& logits, const Tensor& target, int64_t dim,
                    int64_t start) {
  check_strided(op, "logits", logits);
  check_same_device(op, "target", target, logits);
  TORCH_CHECK(dim >= 0 && dim < logits.dim(), op, ": dim=", dim, " was given, and logits have ",
              logits.dim(), " dims; pass the dim of classes, counted from the front.");
  TORCH_CHECK(target.scalar_type() == at::kLong, op, ": target is ", target.scalar_type(),
              ", and classes are indices; pass target.to(torch.int64).");
  at::DimVector rows(logits.sizes().begin(), logits.sizes().end());
  rows.erase(rows.begin() + dim);
  TORCH_CHECK(target.sizes() == at::IntArrayRef(rows), op, ": target is ", target.sizes(),
              " and logits are ", logits.sizes(), " with classes in dim ", dim,
              ", and each row needs one target; pass a target of ", at::IntArrayRef(rows), ".");
  return ClassSplit{c10::multiply_integers(rows.begin(), rows.begin() + dim), logits.size(dim),
                    c10::multiply_integers(rows.begin() + dim, rows.end()), start, false};
}

Tensor weight_of(const char* op, const std::optional<Tensor>& weight, const Tensor& logits,
                 int64_t held) {
  if (!weight.has_value()) return Tensor();
  check_same_device(op, "weight", *weight, logits);
  TORCH_CHECK(weight->dim() == 1 && weight->size(0) == held, op, ": weight is ", weight->sizes(),
              " and the logits hold ", held,
              " classes, and each needs one weight; pass the weights of the classes held here.");
  return dense(weight->to(wide_type(logits.scalar_type())));
}

Tensor split_cross_entropy(const Tensor& logits, const Tensor& target,
                           const std::optional<Tensor>& weight, int64_t dim, int64_t start,
                           bool smooth) {
  const char* op = "split_cross_entropy";
  const Dtype dtype = float_dtype_of(op, "logits", logits);
  ClassSplit split = split_of(op, logits, target, dim, start);
  split.smooth = smooth;
  const Tensor by = weight_of(op, weight, logits, split.held);
  const Tensor x = dense(logits), at = target.contiguous();
  at::DimVector sizes{smooth ? kSmoothPlanes : kPlanes};
  sizes.append(target.sizes().begin(), target.sizes().end());
  Tensor out = at::empty(sizes, x.options().dtype(wide_type(x.scalar_type())));
  void* to = out.data_ptr();
  const void *from = x.const_data_ptr(), *w = data_of(by);
  const int64_t* places = at.const_data_ptr<int64_t>();
  launch_over(
      out, target.numel(), kWorthAThread / std::max<int64_t>(1, split.held),
      [&](int64_t begin, int64_t end) {
        split_cross_entropy_cpu(to, dtype, from, places, w, split, begin, end);
      },
      [&](void* stream) { split_cross_entropy_cuda(to, dtype, from, places, w, split, stream); });
  return out;
}

Tensor split_cross_entropy_backward(const Tensor& logits, const Tensor& target, const Tensor& rows,
                                    const std::optional<Tensor>& weight, int64_t dim,
                                    int64_t start) {
  const char* op = "split_cross_entropy_backward";
  const Dtype dtype = float_dtype_of(op, "logits", logits);
  const ClassSplit split = split_of(op, logits, target, dim, start);
  check_same_device(op, "rows", rows, logits);
  TORCH_CHECK(rows.dim() == target.dim() + 1 && rows.size(0) == 4 &&
                  rows.sizes().slice(1) == target.sizes() &&
                  rows.scalar_type() == wide_type(logits.scalar_type()),
              op, ": rows is ", rows.scalar_type(), rows.sizes(), " and target is ", target.sizes(),
              ", and each row has its reference, scale, shift and pick; pass them stacked, as ",
              wide_type(logits.scalar_type()), ".");
  const Tensor by = weight_of(op, weight, logits, split.held);
  const Tensor x = dense(logits), at = target.contiguous(), numbers = dense(rows);
  Tensor out = at::empty(x.sizes(), x.options());
  void* to = out.data_ptr();
  const void *from = x.const_data_ptr(), *w = data_of(by), *planes = numbers.const_data_ptr();
  const int64_t* places = at.const_data_ptr<int64_t>();
  launch_over(
      out, target.numel(), kWorthAThread / std::max<int64_t>(1, split.held),
      [&](int64_t begin, int64_t end) {
        split_cross_entropy_backward_cpu(to, dtype, from, places, planes, w, split, begin, end);
      },
      [&](void* stream) {
        split_cross_entropy_backward_cuda(to, dtype, from, places, planes, w, split, stream);
      });
  return out;
}

void register_cross_entropy(torch::Library& m) {
  m.impl("split_cross_entropy", &split_cross_entropy);
  m.impl("split_cross_entropy_backward", &split_cross_entropy_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(consistent, CPU, m) { register_cross_entropy(m); }
TORCH_LIBRARY_IMPL(consistent, CUDA, m) { register_cross_entropy(m); }

}  // namespace consistent
