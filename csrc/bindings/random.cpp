// Registers csrc/kernels/random.h as ops of torch: argument checks, box, device, threads, autograd.

#include "../kernels/random.h"

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/aminmax.h>
#include <ATen/ops/argsort.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/empty_like.h>
#include <c10/core/DeviceGuard.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <cmath>
#include <limits>

#include "stream.h"

namespace consistent {
namespace {

using at::IntArrayRef;
using at::Tensor;
using c10::SymInt;
using c10::SymIntArrayRef;

constexpr int64_t kGrain = 1 << 15;  // elements for which another thread pays

Dtype dtype_of(const char* op, const Tensor& x) {
  switch (x.scalar_type()) {
    case at::kFloat:
      return Dtype::f32;
    case at::kDouble:
      return Dtype::f64;
    case at::kHalf:
      return Dtype::f16;
    case at::kBFloat16:
      return Dtype::bf16;
    case at::kByte:
      return Dtype::u8;
    case at::kChar:
      return Dtype::i8;
    case at::kShort:
      return Dtype::i16;
    case at::kInt:
      return Dtype::i32;
    case at::kLong:
      return Dtype::i64;
    case at::kBool:
      return Dtype::boolean;
    default:
      TORCH_CHECK(false, op, ": the tensor is ", x.scalar_type(),
                  ", and values are drawn in float16 to float64, bool and 8 to 64 bit integers "
                  "only; fill a tensor of one of these and convert it, or for a complex one call "
                  "this on torch.view_as_real(x).");
  }
}

void check_floating(const char* op, const Tensor& x) {
  TORCH_CHECK(x.is_floating_point(), op, ": the tensor is ", x.scalar_type(),
              ", and these values are real numbers; use a floating dtype, or call randint_ or "
              "bernoulli_.");
}

void check_layout(const char* op, const Tensor& x) {
  TORCH_CHECK(x.layout() == at::kStrided, op, ": the tensor is ", x.layout(),
              ", and values are drawn for every element of a strided tensor; call x.to_dense() "
              "first.");
}

void check_writable(const char* op, const Tensor& self) {
  check_layout(op, self);
  TORCH_CHECK(!(at::GradMode::is_enabled() && self.requires_grad()), op,
              ": the tensor requires grad and grad mode is on, and filling it in place would leave "
              "autograd a history that is no longer true; call it under torch.no_grad(), or on "
              "x.detach().");
}

// The box of a local tensor. Dims of local size 1 are left out, and a dim that the local tensor
// holds whole is merged with the dim before it.
Box make_box(const char* op, IntArrayRef sizes, IntArrayRef starts, IntArrayRef logical) {
  TORCH_CHECK(
      starts.size() == sizes.size() && logical.size() == sizes.size(), op,
      ": the local tensor has ", sizes.size(), " dims, starts ", starts.size(),
      " and logical_sizes ", logical.size(),
      ", and each dim needs one of each; pass the local shard with all its dims, starts=[0, "
      "...] and logical_sizes=its shape for a tensor that is not cut.");
  for (size_t d = 0; d < sizes.size(); ++d) {
    TORCH_CHECK(starts[d] >= 0 && starts[d] <= logical[d] && sizes[d] <= logical[d] - starts[d], op,
                ": in dim ", d, " the local tensor has ", sizes[d], " elements from index ",
                starts[d], ", and the logical tensor has only ", logical[d],
                "; pass the shard's first index in starts and the whole shape in logical_sizes.");
  }
  Box box;
  int64_t stride = 1;
  bool run_is_open = true;  // the dims seen so far are consecutive in the logical tensor
  int64_t run_stride = 1;
  for (size_t d = sizes.size(); d-- > 0; stride *= logical[d]) {
    box.offset += starts[d] * stride;
    if (sizes[d] == 1) continue;
    if (run_is_open && stride == run_stride) {
      box.run *= sizes[d];
      run_stride *= sizes[d];
      continue;
    }
    run_is_open = false;
    const int last = box.dims - 1;
    if (last >= 0 && stride == box.stride[last] * box.size[last]) {
      box.size[last] *= sizes[d];
    } else {
      TORCH_CHECK(box.dims < Box::kMaxDims, op, ": the local tensor is cut in more than ",
                  Box::kMaxDims, " dims, which is more than are kept; join some of them first.");
      box.size[box.dims] = sizes[d];
      box.stride[box.dims++] = stride;
    }
    box.runs *= sizes[d];
  }
  std::reverse(box.size, box.size + box.dims);
  std::reverse(box.stride, box.stride + box.dims);
  return box;
}

Draw make_draw(int64_t seed, int64_t counter) { return Draw{uint64_t(seed), uint64_t(counter)}; }

// Calls on_cpu(begin, end) from several threads, or on_cuda(stream) with the tensor's device
// current.
template <class OnCpu, class OnCuda>
void launch(const Tensor& out, const OnCpu& on_cpu, const OnCuda& on_cuda) {
  if (out.is_cpu()) return at::parallel_for(0, out.numel(), kGrain, on_cpu);
  const c10::DeviceGuard guard(out.device());
  on_cuda(current_stream(out.device()));
}

// Calls write(x) with a contiguous tensor x: `self` itself if possible, else a buffer that is then
// copied to `self`. A write to the memory of `self` is unknown to torch, so its version is bumped
// here, as autograd requires of in-place ops; copy_() bumps it by itself.
template <class Write>
void through_contiguous(Tensor& self, const Write& write) {
  if (self.is_contiguous() && !self.is_neg()) {
    write(self);
    self.unsafeGetTensorImpl()->bump_version();
    return;
  }
  Tensor whole = at::empty(self.sizes(), self.options());
  write(whole);
  self.copy_(whole);
}

void fill(const char* op, Tensor& self, const Distribution& distribution, Draw draw,
          IntArrayRef starts, IntArrayRef logical) {
  check_writable(op, self);
  const Dtype dtype = dtype_of(op, self);
  const Box box = make_box(op, self.sizes(), starts, logical);
  if (self.numel() == 0) return;
  through_contiguous(self, [&](const Tensor& out) {
    void* data = out.data_ptr();
    launch(
        out,
        [&](int64_t begin, int64_t end) {
          fill_cpu(data, dtype, distribution, draw, box, begin, end);
        },
        [&](void* stream) { fill_cuda(data, dtype, distribution, draw, box, stream); });
  });
}

// The next larger (`up`) or next smaller value of T: as integers, the bits of floats of one sign
// are ordered as their magnitudes.
template <class T, class Bits>
T neighbour(T value, bool up) {
  Bits bits = bits_as<Bits>(value);
  const Bits sign = Bits(1) << (8 * sizeof(Bits) - 1);
  if (double(value) == 0) return bits_as<T>(Bits(up ? 1 : sign | 1));
  return bits_as<T>(Bits(bits + ((double(value) > 0) == up ? 1 : -1)));
}

// Sets the bounds to the smallest T that is at least d.a, and the largest T that is below d.b.
template <class T, class Bits>
void set_bounds(Distribution& d) {
  T bottom = T(d.a), top = T(d.b);
  if (double(bottom) < d.a) bottom = neighbour<T, Bits>(bottom, true);
  if (double(top) >= d.b) top = neighbour<T, Bits>(top, false);
  d.bottom = double(bottom);
  d.top = std::max(double(top), d.bottom);
}

void uniform_(Tensor& self, double low, double high, int64_t seed, int64_t counter,
              IntArrayRef starts, IntArrayRef logical_sizes) {
  const char* op = "uniform_";
  check_floating(op, self);
  Distribution d{Kind::uniform, low, high};
  const Dtype dtype = dtype_of(op, self);
  const double most = dtype == Dtype::f64    ? std::numeric_limits<double>::max()
                      : dtype == Dtype::f16  ? 65504.0
                      : dtype == Dtype::bf16 ? double(std::numeric_limits<c10::BFloat16>::max())
                                             : double(std::numeric_limits<float>::max());
  TORCH_CHECK(low <= high && low >= -most && high <= most && high - low <= most, op, ": [", low,
              ", ", high, ") was given, and the bounds and their distance must be finite in ",
              self.scalar_type(), ", the lower one first; swap or narrow them.");
  if (dtype == Dtype::f64) set_bounds<double, uint64_t>(d);
  if (dtype == Dtype::f32) set_bounds<float, uint32_t>(d);
  if (dtype == Dtype::f16) set_bounds<c10::Half, uint16_t>(d);
  if (dtype == Dtype::bf16) set_bounds<c10::BFloat16, uint16_t>(d);
  fill(op, self, d, make_draw(seed, counter), starts, logical_sizes);
}

void check_scale(const char* op, const char* name, double value, bool good, const char* wanted) {
  TORCH_CHECK(good, op, ": ", name, "=", value, " was given, and it must be ", wanted,
              "; pass such a value.");
}

void normal_(Tensor& self, double mean, double std, int64_t seed, int64_t counter,
             IntArrayRef starts, IntArrayRef logical_sizes) {
  check_floating("normal_", self);
  check_scale("normal_", "std", std, std >= 0, "0 or more");
  fill("normal_", self, Distribution{Kind::normal, mean, std}, make_draw(seed, counter), starts,
       logical_sizes);
}

void log_normal_(Tensor& self, double mean, double std, int64_t seed, int64_t counter,
                 IntArrayRef starts, IntArrayRef logical_sizes) {
  check_floating("log_normal_", self);
  check_scale("log_normal_", "std", std, std > 0, "more than 0");
  fill("log_normal_", self, Distribution{Kind::log_normal, mean, std}, make_draw(seed, counter),
       starts, logical_sizes);
}

void exponential_(Tensor& self, double rate, int64_t seed, int64_t counter, IntArrayRef starts,
                  IntArrayRef logical_sizes) {
  check_floating("exponential_", self);
  check_scale("exponential_", "rate", rate, rate > 0, "more than 0");
  fill("exponential_", self, Distribution{Kind::exponential, rate}, make_draw(seed, counter),
       starts, logical_sizes);
}

void cauchy_(Tensor& self, double median, double scale, int64_t seed, int64_t counter,
             IntArrayRef starts, IntArrayRef logical_sizes) {
  check_floating("cauchy_", self);
  check_scale("cauchy_", "scale", scale, scale > 0, "more than 0");
  fill("cauchy_", self, Distribution{Kind::cauchy, median, scale}, make_draw(seed, counter), starts,
       logical_sizes);
}

// The largest number that double represents and that can be converted to the dtype.
double largest(Dtype dtype) {
  switch (dtype) {
    case Dtype::u8:
      return 255;
    case Dtype::i8:
      return 127;
    case Dtype::i16:
      return 32767;
    case Dtype::i32:
      return 2147483647;
    case Dtype::i64:
      return 9223372036854774784.0;
    case Dtype::boolean:
      return 1;
    case Dtype::f16:
      return 65504;
    default:
      return std::numeric_limits<double>::infinity();
  }
}

double smallest(Dtype dtype) {
  switch (dtype) {
    case Dtype::u8:
    case Dtype::boolean:
      return 0;
    case Dtype::i8:
    case Dtype::i16:
    case Dtype::i32:
      return -largest(dtype) - 1;
    case Dtype::i64:
      return -9223372036854775808.0;
    default:
      return -largest(dtype);
  }
}

void geometric_(Tensor& self, double p, int64_t seed, int64_t counter, IntArrayRef starts,
                IntArrayRef logical_sizes) {
  check_scale("geometric_", "p", p, p > 0 && p < 1, "between 0 and 1, neither included");
  const Distribution d{Kind::geometric, std::log1p(-p), largest(dtype_of("geometric_", self))};
  fill("geometric_", self, d, make_draw(seed, counter), starts, logical_sizes);
}

// {last, whether any word is accepted}: word <= last has probability ceil(p 2^32) / 2^32. `last`
// alone cannot express the probability 0.
std::pair<uint32_t, bool> threshold(double p) {
  const uint64_t words = uint64_t(std::ceil(p * 0x1p32));
  return {words == 0 ? 0 : uint32_t(words - 1), words != 0};
}

void bernoulli_(Tensor& self, double p, int64_t seed, int64_t counter, IntArrayRef starts,
                IntArrayRef logical_sizes) {
  check_scale("bernoulli_", "p", p, p >= 0 && p <= 1, "between 0 and 1");
  Distribution d{Kind::bernoulli};
  const auto [last, possible] = threshold(p);
  d.last = last;
  d.a = possible;
  fill("bernoulli_", self, d, make_draw(seed, counter), starts, logical_sizes);
}

void bernoulli_tensor_(Tensor& self, const Tensor& p, int64_t seed, int64_t counter,
                       IntArrayRef starts, IntArrayRef logical_sizes) {
  const char* op = "bernoulli_tensor_";
  check_writable(op, self);
  TORCH_CHECK(p.sizes() == self.sizes() && p.device() == self.device(), op, ": p is ", p.sizes(),
              " on ", p.device(), " and the tensor is ", self.sizes(), " on ", self.device(),
              ", and each element needs its own p; pass p.expand(x.shape) cut like the tensor.");
  TORCH_CHECK(p.is_floating_point(), op, ": p is ", p.scalar_type(),
              ", and a probability is a real number; pass p.to(torch.float32).");
  const Dtype dtype = dtype_of(op, self);
  const Box box = make_box(op, self.sizes(), starts, logical_sizes);
  if (self.numel() == 0) return;
  const Tensor chances = p.detach().to(at::kDouble).contiguous();
  if (self.is_cpu()) {  // not on CUDA, where item() would wait for the device
    const auto [least, most] = at::aminmax(chances);
    const double low = least.item<double>(), high = most.item<double>();
    TORCH_CHECK(
        low >= 0 && high <= 1, op, ": p reaches from ", low, " to ", high,
        ", and a probability lies between 0 and 1; pass p.clamp(0, 1) or correct its source.");
  }
  const Draw draw = make_draw(seed, counter);
  const double* from = chances.const_data_ptr<double>();
  through_contiguous(self, [&](const Tensor& out) {
    void* data = out.data_ptr();
    launch(
        out,
        [&](int64_t begin, int64_t end) {
          bernoulli_cpu(data, dtype, from, draw, box, begin, end);
        },
        [&](void* stream) { bernoulli_cuda(data, dtype, from, draw, box, stream); });
  });
}

void randint_(Tensor& self, int64_t low, int64_t high, int64_t seed, int64_t counter,
              IntArrayRef starts, IntArrayRef logical_sizes) {
  const Dtype dtype = dtype_of("randint_", self);
  TORCH_CHECK(low < high, "randint_: [", low, ", ", high,
              ") was given, and it holds no integer; pass high > low.");
  TORCH_CHECK(
      double(low) >= smallest(dtype) && (dtype == Dtype::i64 || double(high - 1) <= largest(dtype)),
      "randint_: [", low, ", ", high, ") was given, and ", self.scalar_type(),
      " does not hold all of it; narrow the range or use a wider dtype.");
  Distribution d{Kind::randint};
  d.low = low;
  d.range = uint64_t(high) - uint64_t(low);
  fill("randint_", self, d, make_draw(seed, counter), starts, logical_sizes);
}

// Sorts the indices by random 64-bit keys. The sort is stable, so that equal keys give the same
// permutation on all devices.
Tensor randperm(int64_t n, int64_t seed, int64_t counter, std::optional<at::Device> device) {
  TORCH_CHECK(n >= 0, "randperm: n=", n,
              " was given, and there is no permutation of that many; pass n >= 0.");
  Tensor keys = at::empty({n}, at::TensorOptions().dtype(at::kLong).device(device));
  if (keys.is_meta()) return keys;
  Distribution words{Kind::randint};  // range 0 means 2^64
  const int64_t start = 0;
  fill("randperm", keys, words, make_draw(seed, counter), start, n);
  return at::argsort(keys, /*stable=*/true, /*dim=*/0, /*descending=*/false);
}

Tensor dropout(const Tensor& x, double p, int64_t seed, int64_t counter, IntArrayRef starts,
               IntArrayRef logical_sizes) {
  check_layout("dropout", x);
  TORCH_CHECK(x.is_floating_point(), "dropout: x is ", x.scalar_type(),
              ", and what is kept is scaled by a real number; call x.to(torch.float32) first.");
  check_scale("dropout", "p", p, p >= 0 && p <= 1, "between 0 and 1");
  const Dtype dtype = dtype_of("dropout", x);
  const Box box = make_box("dropout", x.sizes(), starts, logical_sizes);
  const Tensor from = x.resolve_neg().contiguous();
  Tensor out = at::empty_like(from, at::MemoryFormat::Contiguous);
  if (out.numel() == 0) return out;
  const auto [last, possible] = threshold(1 - p);
  const Dropout rule{last, possible ? 1 / (1 - p) : 0.0};
  const Draw draw = make_draw(seed, counter);
  const void* read = from.const_data_ptr();
  void* data = out.data_ptr();
  launch(
      out,
      [&](int64_t begin, int64_t end) {
        dropout_cpu(data, dtype, read, rule, draw, box, begin, end);
      },
      [&](void* stream) { dropout_cuda(data, dtype, read, rule, draw, box, stream); });
  return out;
}

using DropoutSchema = Tensor(const Tensor&, double, int64_t, SymInt, SymIntArrayRef,
                             SymIntArrayRef);

Tensor call_dropout(const Tensor& x, double p, int64_t seed, const SymInt& counter,
                    SymIntArrayRef starts, SymIntArrayRef logical_sizes) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("consistent::dropout", "")
                             .typed<DropoutSchema>();
  return op.call(x, p, seed, counter, starts, logical_sizes);
}

// Dropout is linear in x, so the backward is the forward applied to the gradient. The mask is drawn
// again from the same seed and counter, and is not saved. The arguments are SymInts: under
// torch.compile they may be symbolic, and ops must not turn them into constants.
struct DropoutFunction : torch::autograd::Function<DropoutFunction> {
  static Tensor forward(torch::autograd::AutogradContext* ctx, const Tensor& x, double p,
                        int64_t seed, const SymInt& counter, SymIntArrayRef starts,
                        SymIntArrayRef logical_sizes) {
    ctx->saved_data["p"] = p;
    ctx->saved_data["seed"] = seed;
    ctx->saved_data["counter"] = counter;
    ctx->saved_data["starts"] = starts;
    ctx->saved_data["logical_sizes"] = logical_sizes;
    const at::AutoDispatchBelowADInplaceOrView below;
    return call_dropout(x, p, seed, counter, starts, logical_sizes);
  }

  static torch::autograd::variable_list backward(torch::autograd::AutogradContext* ctx,
                                                 torch::autograd::variable_list gradients) {
    auto& saved = ctx->saved_data;
    const auto starts = saved["starts"].toSymIntVector();
    const auto logical_sizes = saved["logical_sizes"].toSymIntVector();
    return {call_dropout(gradients[0], saved["p"].toDouble(), saved["seed"].toInt(),
                         saved["counter"].toSymInt(), starts, logical_sizes),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor(),
            Tensor()};
  }
};

Tensor dropout_autograd(const Tensor& x, double p, int64_t seed, SymInt counter,
                        SymIntArrayRef starts, SymIntArrayRef logical_sizes) {
  return DropoutFunction::apply(x, p, seed, counter, starts, logical_sizes);
}

void register_random(torch::Library& m) {
  m.impl("uniform_", &uniform_);
  m.impl("normal_", &normal_);
  m.impl("log_normal_", &log_normal_);
  m.impl("exponential_", &exponential_);
  m.impl("cauchy_", &cauchy_);
  m.impl("geometric_", &geometric_);
  m.impl("bernoulli_", &bernoulli_);
  m.impl("bernoulli_tensor_", &bernoulli_tensor_);
  m.impl("randint_", &randint_);
  m.impl("dropout", &dropout);
}

}  // namespace

TORCH_LIBRARY_IMPL(consistent, CPU, m) { register_random(m); }
TORCH_LIBRARY_IMPL(consistent, CUDA, m) { register_random(m); }
TORCH_LIBRARY_IMPL(consistent, Autograd, m) { m.impl("dropout", &dropout_autograd); }
TORCH_LIBRARY_IMPL(consistent, CompositeExplicitAutograd, m) { m.impl("randperm", &randperm); }

}  // namespace consistent
