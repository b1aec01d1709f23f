// Registers csrc/kernels/masked_embedding.h as ops of torch. Autograd is in
// consistent/forms/families/layers/embedding.py, which also supports forward mode and double
// backward.

#include "../kernels/masked_embedding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
#include <ATen/ops/zeros.h>
#include <torch/library.h>

#include "common.h"

namespace consistent {
namespace {

using at::Tensor;

Tensor places_of(const char* op, const Tensor& index, const Tensor& x) {
  check_same_device(op, "index", index, x);
  TORCH_CHECK(index.scalar_type() == at::kLong || index.scalar_type() == at::kInt, op,
              ": index is ", index.scalar_type(),
              ", and rows are counted by int32 or int64; pass index.to(torch.int64).");
  return index.to(at::kLong).contiguous();
}

void check_table(const char* op, const char* name, const Tensor& x) {
  check_strided(op, name, x);
  TORCH_CHECK(x.dim() == 2, op, ": ", name, " is ", x.sizes(),
              ", and a table has rows and columns; pass a matrix.");
}

at::DimVector with_width(const Tensor& index, int64_t width) {
  at::DimVector sizes(index.sizes().begin(), index.sizes().end());
  sizes.push_back(width);
  return sizes;
}

Tensor masked_embedding(const Tensor& table, const Tensor& index, int64_t start, double scale) {
  const char* op = "masked_embedding";
  check_table(op, "table", table);
  const bool copied = scale == 1;  // bytes are copied then, so the dtype does not matter
  const Dtype dtype = copied ? Dtype::u8 : float_dtype_of(op, "table", table);
  const Tensor places = places_of(op, index, table), from = dense(table.resolve_conj());
  const RowWindow window{table.size(1) * (copied ? int64_t(table.itemsize()) : 1), start,
                         table.size(0)};
  Tensor out = at::empty(with_width(index, table.size(1)), table.options());
  void* to = out.data_ptr();
  const void* rows = from.const_data_ptr();
  const int64_t *at = places.const_data_ptr<int64_t>(), count = places.numel();
  launch_over(
      out, count, kWorthAThread / std::max<int64_t>(1, window.width),
      [&](int64_t begin, int64_t end) {
        masked_embedding_cpu(to, dtype, rows, at, scale, window, begin, end);
      },
      [&](void* stream) {
        masked_embedding_cuda(to, dtype, rows, at, scale, window, count, stream);
      });
  return out;
}

Tensor masked_embedding_backward(const Tensor& gradient, const Tensor& index, int64_t rows,
                                 int64_t start, int64_t padding_idx, bool by_count, double scale) {
  const char* op = "masked_embedding_backward";
  check_strided(op, "gradient", gradient);
  TORCH_CHECK(
      gradient.dim() == index.dim() + 1 && gradient.sizes().slice(0, index.dim()) == index.sizes(),
      op, ": gradient is ", gradient.sizes(), " and index ", index.sizes(),
      ", and each index has a row of the gradient; pass a gradient of ", index.sizes(),
      " and the table's columns.");
  TORCH_CHECK(rows >= 0, op, ": rows=", rows,
              " was given; pass how many rows are held, 0 or more.");
  if (gradient.is_complex()) {
    const Tensor parts = at::view_as_real(gradient.resolve_conj()).flatten(-2);
    const Tensor made =
        masked_embedding_backward(parts, index, rows, start, padding_idx, by_count, scale);
    return at::view_as_complex(made.view({rows, -1, 2}));
  }
  const Dtype dtype = float_dtype_of(op, "gradient", gradient);
  const Tensor places = places_of(op, index, gradient).flatten(), from = dense(gradient);
  const RowWindow window{gradient.size(-1), start, rows};
  Tensor out = at::zeros({rows, window.width}, gradient.options());
  if (out.numel() == 0 || places.numel() == 0) return out;
  const Tensor local = places.sub(start);
  Tensor elsewhere = local.lt(0).logical_or_(local.ge(rows));
  if (padding_idx >= 0) elsewhere.logical_or_(places.eq(padding_idx));
  // A GPU's radix sort takes some bits of the keys per pass, so narrow keys need fewer passes. The
  // key `rows`, of look-ups that belong to no row, must fit too.
  const at::ScalarType narrow = !places.is_cuda()   ? at::kLong
                                : rows <= INT16_MAX ? at::kShort
                                : rows <= INT32_MAX ? at::kInt
                                                    : at::kLong;
  const auto [keys, order] =
      local.masked_fill(elsewhere, rows).to(narrow).sort(/*stable=*/true, 0, false);
  const Tensor row = keys.to(at::kLong);
  const SortedRows sorted{row.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(),
                          places.numel()};
  void* to = out.data_ptr();
  const void* read = from.const_data_ptr();
  launch_over(
      out, sorted.count, kWorthAThread / std::max<int64_t>(1, window.width),
      [&](int64_t begin, int64_t end) {
        masked_embedding_backward_cpu(to, dtype, read, sorted, scale, by_count, window, begin, end);
      },
      [&](void* stream) {
        masked_embedding_backward_cuda(to, dtype, read, sorted, scale, by_count, window, stream);
      });
  return out;
}

void register_embedding(torch::Library& m) {
  m.impl("masked_embedding", &masked_embedding);
  m.impl("masked_embedding_backward", &masked_embedding_backward);
}

}  // namespace

TORCH_LIBRARY_IMPL(consistent, CPU, m) { register_embedding(m); }
TORCH_LIBRARY_IMPL(consistent, CUDA, m) { register_embedding(m); }

}  // namespace consistent
