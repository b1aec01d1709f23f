#include "arguments.h"

#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace consistent::peer {
namespace {

struct Numbers {
  const char* name;
  int type;   // -1: its numbers can be moved but not combined
  int pairs;  // 2 for complex numbers
};

Numbers numbers_of(at::ScalarType type) {
  switch (type) {
    case at::kChar:
      return {"int8", int(Type::int8), 1};
    case at::kByte:
      return {"uint8", int(Type::uint8), 1};
    case at::kShort:
      return {"int16", int(Type::int16), 1};
    case at::kUInt16:
      return {"uint16", int(Type::uint16), 1};
    case at::kInt:
      return {"int32", int(Type::int32), 1};
    case at::kUInt32:
      return {"uint32", int(Type::uint32), 1};
    case at::kLong:
      return {"int64", int(Type::int64), 1};
    case at::kUInt64:
      return {"uint64", int(Type::uint64), 1};
    case at::kFloat:
      return {"float32", int(Type::float32), 1};
    case at::kDouble:
      return {"float64", int(Type::float64), 1};
    case at::kHalf:
      return {"float16", int(Type::float16), 1};
    case at::kBFloat16:
      return {"bfloat16", int(Type::bfloat16), 1};
    case at::kBool:
      return {"bool", int(Type::boolean), 1};
    case at::kComplexFloat:
      return {"complex64", int(Type::float32), 2};
    case at::kComplexDouble:
      return {"complex128", int(Type::float64), 2};
    default:
      return {c10::toString(type), -1, 1};
  }
}

}  // namespace

void need(bool fact, const char* text) {
  if (!fact) throw std::invalid_argument(text);
}

Tensor tensor(PyObject* object) {
  need(THPVariable_Check(object), "a tensor is needed");
  return THPVariable_Unpack(object);
}

Tensor plain(PyObject* object) {
  Tensor x = tensor(object);
  need(x.device().is_cpu() && x.layout() == at::kStrided, "a CPU tensor is needed");
  if (x.is_contiguous() && !x.is_conj() && !x.is_neg() && !x._is_zerotensor()) return x;
  // Below autograd, so that the copies are not recorded.
  const at::AutoDispatchBelowADInplaceOrView no_grad;
  if (x._is_zerotensor()) x = x.clone();
  return x.resolve_conj().resolve_neg().contiguous();
}

std::vector<Tensor> tensors(PyObject* list, const Group& group) {
  need(PyList_Check(list) && PyList_GET_SIZE(list) == group.size(),
       "one tensor for each rank is needed");
  std::vector<Tensor> values;
  for (int k = 0; k < group.size(); ++k) values.push_back(plain(PyList_GET_ITEM(list, k)));
  return values;
}

std::vector<Tensor> alike(PyObject* list) {
  need(PyList_Check(list) && PyList_GET_SIZE(list) > 0, "a list of tensors is needed");
  std::vector<Tensor> values;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(list); ++i) {
    values.push_back(plain(PyList_GET_ITEM(list, i)));
    need(values[i].scalar_type() == values[0].scalar_type(), "tensors of one dtype are needed");
  }
  return values;
}

at::ScalarType dtype(PyObject* object) {
  need(THPDtype_Check(object), "a dtype is needed");
  return reinterpret_cast<THPDtype*>(object)->scalar_type;
}

int64_t integer(PyObject* object) {
  const int64_t value = PyLong_AsLongLong(object);
  if (value == -1 && PyErr_Occurred()) throw pybind11::error_already_set();
  return value;
}

Sizes integers(PyObject* sequence) {
  const auto fast = pybind11::reinterpret_steal<pybind11::object>(
      PySequence_Fast(sequence, "a sequence of sizes is needed"));
  if (!fast) throw pybind11::error_already_set();
  Sizes values(PySequence_Fast_GET_SIZE(fast.ptr()));
  for (size_t k = 0; k < values.size(); ++k) {
    values[k] = integer(PySequence_Fast_GET_ITEM(fast.ptr(), k));
  }
  return values;
}

Sizes sizes_of(PyObject* object, const Group& group) {
  const Sizes sizes = integers(object);
  need(int(sizes.size()) == group.size(), "one size for each rank is needed");
  for (const int64_t size : sizes) need(size >= 0, "sizes must not be negative");
  return sizes;
}

int64_t total(const Sizes& sizes) {
  int64_t sum = 0;
  for (const int64_t size : sizes) sum += size;
  return sum;
}

void need_cut(const Call& call, const Tensor& x, int dim, const Sizes& sizes) {
  if (total(sizes) == x.size(dim)) return;
  throw std::invalid_argument("the sizes of the parts add up to " + std::to_string(total(sizes)) +
                              ", not to that of the dim, in " + call.text());
}

int dim_of(PyObject* object, const Tensor& x) {
  int64_t dim = integer(object);
  if (dim < 0) dim += x.dim();
  need(0 <= dim && dim < x.dim(), "the tensor has no such dim");
  return int(dim);
}

Op op_of(PyObject* name) {
  const std::string text = pybind11::cast<std::string>(name);
  need(text == "sum" || text == "max" || text == "min", "op must be sum, max or min");
  return text == "sum" ? Op::sum : text == "max" ? Op::max : Op::min;
}

int source_of(PyObject* object, const Group& group) {
  const int64_t source = integer(object);
  need(0 <= source && source < group.size(), "the source is not in the group");
  return int(source);
}

Type type_of(at::ScalarType type) {
  const int found = numbers_of(type).type;
  need(found >= 0, "numbers of this dtype cannot be combined in shared memory");
  return Type(found);
}

int pairs_of(at::ScalarType type) { return numbers_of(type).pairs; }

Call call_of(Kind kind, const Tensor& x, bool shaped) {
  Call call{kind};
  strncpy(call.dtype, numbers_of(x.scalar_type()).name, sizeof call.dtype - 1);
  if (!shaped) return call;
  call.ndim = int(x.dim());
  for (int d = 0; d < std::min(call.ndim, kMaxDims); ++d) call.shape[d] = x.size(d);
  return call;
}

Call call_all_reduce(const Tensor& x, Op op) {
  Call call = call_of(Kind::all_reduce, x);
  call.op = int(op);
  return call;
}

Call call_reduce_scatter(const Tensor& x, int dim, Op op) {
  Call call = call_of(Kind::reduce_scatter, x);
  call.op = int(op);
  call.dim = dim;
  return call;
}

Call call_all_gather(const Tensor& x, int dim) {
  Call call = call_of(Kind::all_gather, x);
  call.dim = call.free = dim;
  return call;
}

Call call_all_to_all(const Tensor& x, int split, int dim) {
  Call call = call_of(Kind::all_to_all, x);
  call.split = split;
  call.dim = call.free = dim;
  return call;
}

Call call_several(Kind kind, const std::vector<Tensor>& xs, const Sizes& numbers) {
  Call call = call_of(kind, xs[0], false);
  call.several = int32_t(xs.size());
  call.hash = 14695981039346656037u;  // FNV-1a
  for (const int64_t number : numbers) call.hash = (call.hash ^ uint64_t(number)) * 1099511628211u;
  return call;
}

Call call_broadcast(const Tensor& x, int source, const Group& group) {
  Call call = call_of(Kind::broadcast, x);
  call.source = group.ranks()[source];
  return call;
}

}  // namespace consistent::peer
