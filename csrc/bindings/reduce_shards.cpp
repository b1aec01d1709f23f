// Registers csrc/kernels/reduce_shards.h as an op of torch. Autograd is in
// consistent/forms/native/, since the parts may come from other ranks, to which the gradient is
// then sent.

#include "../kernels/reduce_shards.h"

#include <torch/library.h>

#include "common.h"

namespace consistent {
namespace {

using at::Tensor;

constexpr const char* kOp = "reduce_shards";

Activation activation_of(std::string_view name) {
  if (name == "none") return Activation::none;
  if (name == "relu") return Activation::relu;
  if (name == "gelu") return Activation::gelu;
  if (name == "gelu_tanh") return Activation::gelu_tanh;
  TORCH_CHECK(name == "silu", kOp, ": activation=\"", name,
              "\" is not known; pass none, relu, gelu, gelu_tanh or silu, and apply any other to "
              "the result.");
  return Activation::silu;
}

Norm norm_of(std::string_view name) {
  if (name == "none") return Norm::none;
  if (name == "layer") return Norm::layer;
  TORCH_CHECK(name == "rms", kOp, ": norm=\"", name,
              "\" is not known; pass none, layer or rms, and apply any other to the result.");
  return Norm::rms;
}

std::vector<Tensor> parts_of(at::TensorList parts) {
  TORCH_CHECK(!parts.empty() && parts.size() <= Parts::kMost, kOp, ": ", parts.size(),
              " parts were given; pass 1 to ", Parts::kMost,
              ", and add more of them in several calls.");
  std::vector<Tensor> made;
  for (const Tensor& part : parts) {
    check_strided(kOp, "a part", part);
    check_same_device(kOp, "a part", part, parts[0]);
    TORCH_CHECK(part.sizes() == parts[0].sizes() && part.scalar_type() == parts[0].scalar_type(),
                kOp, ": one part is ", part.scalar_type(), part.sizes(), " and another ",
                parts[0].scalar_type(), parts[0].sizes(),
                ", and they are added element by element; pass parts of one shape and dtype.");
    made.push_back(dense(part));
  }
  return made;
}

// The number of columns, if a contiguous run of elements is divided into rows for several threads:
// the largest divisor of `run` in [1024, 8192], or `run` itself if there is none.
int64_t shared_out(int64_t run) {
  for (int64_t columns = 8192; columns >= 1024; --columns) {
    if (run % columns == 0) return columns;
  }
  return run;
}

// The slice as rows. With a norm or a bias, a row has the elements that the norm or bias spans;
// otherwise the row length is free.
RowsOfSlice rows_of(at::IntArrayRef sizes, int64_t dim, int64_t start, int64_t size,
                    int64_t normalized, bool biased) {
  const int64_t ndim = int64_t(sizes.size());
  TORCH_CHECK(ndim > 0 && dim >= 0 && dim < ndim, kOp, ": dim=", dim, " was given, and parts are ",
              sizes, "; pass a dim of theirs, counted from the front.");
  TORCH_CHECK(start >= 0 && size >= 0 && start <= sizes[dim] && size <= sizes[dim] - start, kOp,
              ": the slice begins at ", start, " and has ", size, " elements, and dim ", dim,
              " has ", sizes[dim], "; pass one that lies inside.");
  TORCH_CHECK(normalized >= 0 && normalized <= ndim &&
                  (normalized == 0 || size == sizes[dim] || dim < ndim - normalized),
              kOp, ": the last ", normalized, " dims of ", sizes, " are normalized and dim ", dim,
              " is cut, and a norm needs whole rows; cut another dim, or reduce without the norm.");
  at::DimVector kept(sizes.begin(), sizes.end());
  kept[dim] = size;
  const int64_t elements = c10::multiply_integers(kept);
  const int64_t inner = c10::multiply_integers(kept.begin() + dim + 1, kept.end());
  const auto tail = std::max<int64_t>(1, normalized);
  int64_t columns = c10::multiply_integers(kept.end() - tail, kept.end());
  if (elements == 0) return RowsOfSlice{0, columns, 1, 0, 0};
  if (normalized == 0 && !biased) {
    columns = shared_out(size == sizes[dim] ? elements : size * inner);
  }
  if (size == sizes[dim]) return RowsOfSlice{elements / columns, columns, elements, 0, 0};
  return RowsOfSlice{elements / columns, columns, size * inner / columns, sizes[dim] * inner,
                     start * inner};
}

Tensor vector_of(const char* name, const std::optional<Tensor>& x, const Tensor& like,
                 int64_t columns) {
  if (!x.has_value()) return Tensor();
  check_same_device(kOp, name, *x, like);
  TORCH_CHECK(x->numel() == columns, kOp, ": ", name, " is ", x->sizes(), " and rows have ",
              columns, " elements, and each needs one; pass as many.");
  return dense(*x);
}

// Converts the vectors to the dtype of the sum, unless the kernel can read them as they are: CUDA
// can if all have the parts' dtype. Returns whether it has converted them.
bool widened(std::initializer_list<Tensor*> vectors, const Tensor& like) {
  const auto is_narrow = [&](Tensor* x) {
    return !x->defined() || x->scalar_type() == like.scalar_type();
  };
  if (like.is_cuda() && std::all_of(vectors.begin(), vectors.end(), is_narrow)) return false;
  for (Tensor* x : vectors) {
    if (x->defined()) *x = x->to(wide_type(like.scalar_type()));
  }
  return true;
}

std::tuple<Tensor, Tensor> reduce_shards(at::TensorList parts, int64_t dim, int64_t start,
                                         int64_t size, double scale,
                                         const std::optional<Tensor>& bias,
                                         const std::optional<Tensor>& residual,
                                         c10::string_view activation, c10::string_view norm,
                                         int64_t normalized, const std::optional<Tensor>& weight,
                                         const std::optional<Tensor>& norm_bias, double eps,
                                         bool keep_total, std::optional<at::ScalarType> dtype) {
  const std::vector<Tensor> read = parts_of(parts);
  const Tensor& first = read[0];
  Epilogue epilogue;
  epilogue.scale = scale, epilogue.eps = eps;
  epilogue.activation = activation_of(activation), epilogue.norm = norm_of(norm);
  TORCH_CHECK((epilogue.norm == Norm::none) == (normalized == 0) &&
                  (epilogue.norm != Norm::none || (!weight.has_value() && !norm_bias.has_value())),
              kOp, ": norm is \"", norm, "\" and ", normalized,
              " dims are to be normalized; pass both or neither, and weight and norm_bias only "
              "with them.");
  const RowsOfSlice slice = rows_of(first.sizes(), dim, start, size, normalized, bias.has_value());
  at::DimVector sizes(first.sizes().begin(), first.sizes().end());
  sizes[dim] = size;
  const int64_t width = sizes.back();
  TORCH_CHECK(!bias.has_value() || normalized < 2, kOp, ": a bias and a norm over ", normalized,
              " dims were given, and the bias has one of them; give it as a residual.");
  Tensor by_column = vector_of("bias", bias, first, width);
  Tensor by = vector_of("weight", weight, first, slice.columns);
  Tensor plus = vector_of("norm_bias", norm_bias, first, slice.columns);
  epilogue.narrow = !widened({&by_column, &by, &plus}, first);
  Tensor more;
  if (residual.has_value()) {
    check_same_device(kOp, "residual", *residual, first);
    TORCH_CHECK(residual->sizes() == at::IntArrayRef(sizes), kOp, ": residual is ",
                residual->sizes(), " and the result ", at::IntArrayRef(sizes),
                "; pass one of the result's shape.");
    more = dense(residual->to(first.scalar_type()));
  }
  epilogue.bias = data_of(by_column), epilogue.residual = data_of(more);
  epilogue.weight = data_of(by), epilogue.norm_bias = data_of(plus);

  Tensor out = at::empty(sizes, first.options().dtype(dtype.value_or(first.scalar_type())));
  Tensor total = at::empty(keep_total ? sizes : at::DimVector{0}, out.options());
  const Dtype kind = float_dtype_of(kOp, "dtype", out);
  TORCH_CHECK(out.scalar_type() == first.scalar_type() ||
                  out.scalar_type() == wide_type(first.scalar_type()),
              kOp, ": dtype is ", out.scalar_type(), " and the parts are ", first.scalar_type(),
              ", and the result is of theirs or of the dtype they are added in, ",
              wide_type(first.scalar_type()), "; convert the result.");
  Parts list;
  list.count = int(read.size()), list.dtype = float_dtype_of(kOp, "a part", first);
  for (size_t p = 0; p < read.size(); ++p) list.data[p] = read[p].const_data_ptr();
  void *to = out.data_ptr(), *sum = keep_total ? total.data_ptr() : nullptr;
  launch_over(
      out, slice.rows, kWorthAThread / std::max<int64_t>(1, slice.columns),
      [&](int64_t begin, int64_t end) {
        reduce_shards_cpu(to, sum, kind, list, epilogue, slice, begin, end);
      },
      [&](void* stream) { reduce_shards_cuda(to, sum, kind, list, epilogue, slice, stream); });
  return {out, total};
}

}  // namespace

TORCH_LIBRARY_IMPL(consistent, CPU, m) { m.impl("reduce_shards", &reduce_shards); }
TORCH_LIBRARY_IMPL(consistent, CUDA, m) { m.impl("reduce_shards", &reduce_shards); }

}  // namespace consistent
