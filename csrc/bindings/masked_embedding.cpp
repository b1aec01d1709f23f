// Registers csrc/kernels/masked_embedding.h as ops of torch. Autograd is in
// consistent/forms/families/layers/embedding.py, which also supports forward mode and double
// backward.

#include "../kernels/masked_embedding.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/view_as_complex.h>
#include <ATen/ops/view_as_real.h>
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

// What both versions of the backward take.
struct Backward {
  Tensor gradient, index, out;  // contiguous; the index is int64
  RowWindow window;
  int64_t padding_row;
  double scale;
  bool by_count;
};

void run_on_cpu(Dtype dtype, const Backward& it) {
  const auto [width, start, rows] = it.window;
  const Tensor local = it.index.flatten().sub(start);
  const Tensor elsewhere =
      local.lt(0).logical_or_(local.ge(rows)).logical_or_(local.eq(it.padding_row));
  const auto [row, order] = local.masked_fill(elsewhere, rows).sort(/*stable=*/true, 0, false);
  const SortedRows sorted{row.const_data_ptr<int64_t>(), order.const_data_ptr<int64_t>(),
                          it.index.numel()};
  void* to = it.out.data_ptr();
  const void* read = it.gradient.const_data_ptr();
  at::parallel_for(0, sorted.count, std::max<int64_t>(1, kWorthAThread / width),
                   [&](int64_t begin, int64_t end) {
                     masked_embedding_backward_cpu(to, dtype, read, sorted, it.scale, it.by_count,
                                                   it.window, begin, end);
                   });
}

void run_on_cuda(const char* op, Dtype dtype, const Backward& it) {
  const int64_t count = it.index.numel();
  TORCH_CHECK(count <= INT32_MAX, op, ": index has ", count,
              " elements, and a GPU numbers them by int32; call it with parts of fewer than 2^31, "
              "and add the results.");
  const c10::DeviceGuard guard(it.out.device());
  const Tensor memory =
      at::empty({memory_words(count, it.window.held)}, it.index.options().dtype(at::kInt));
  const LookUps look_ups{it.index.const_data_ptr<int64_t>(), count, it.padding_row,
                         memory.data_ptr<int32_t>()};
  masked_embedding_backward_cuda(it.out.data_ptr(), dtype, it.gradient.const_data_ptr(), look_ups,
                                 it.scale, it.by_count, it.window, current_stream(it.out.device()));
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
  const Tensor places = places_of(op, index, gradient);
  const RowWindow window{gradient.size(-1), start, rows};
  Tensor out = at::empty({rows, window.width}, gradient.options());
  if (out.numel() == 0) return out;
  if (places.numel() == 0) return out.zero_();
  const int64_t padding_row = padding_idx >= 0 ? padding_idx - start : -1;
  const Backward given{dense(gradient), places, out, window, padding_row, scale, by_count};
  places.is_cpu() ? run_on_cpu(dtype, given) : run_on_cuda(op, dtype, given);
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
