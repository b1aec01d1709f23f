#include "sizes.h"

#include <torch/csrc/DynamicTypes.h>
#include <torch/csrc/autograd/python_variable.h>

namespace consistent::dispatch {
namespace {

// Appends the ints in `values` to `sizes`; false if a value is not an int that fits in 64 bits.
bool read_ints(PyObject* const* values, Py_ssize_t count, Sizes* sizes) {
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!PyLong_CheckExact(values[i])) return false;
    int overflow = 0;
    sizes->push_back(PyLong_AsLongLongAndOverflow(values[i], &overflow));
    if (overflow != 0) return false;
  }
  return true;
}

// Reads the arguments after the tensor: sizes one by one, or one tuple or list of sizes.
bool read_given(const Arguments& given, SizeArguments* sizes) {
  const bool named = (given.names != nullptr && PyTuple_GET_SIZE(given.names) != 0) ||
                     (given.dict != nullptr && PyDict_GET_SIZE(given.dict) != 0);
  if (named || given.count < 2) return false;
  PyObject* first = given.values[1];
  sizes->in_sequence = given.count == 2 && (PyTuple_Check(first) || PyList_CheckExact(first));
  if (!sizes->in_sequence) return read_ints(given.values + 1, given.count - 1, &sizes->whole);
  PyObject* const* values = PyTuple_Check(first) ? &PyTuple_GET_ITEM(first, 0)
                                                 : reinterpret_cast<PyListObject*>(first)->ob_item;
  return read_ints(values, Py_SIZE(first), &sizes->whole);
}

int64_t product(const Sizes& sizes, int64_t end) {
  int64_t found = 1;
  for (int64_t i = 0; i < end; ++i) found *= sizes[i];
  return found;
}

// Replaces a -1 by the size that remains; false if there are two, if a size is 0, or if the numbers
// of elements do not match.
bool resolve(const Sizes& ins, Sizes* sizes) {
  int64_t rest = product(ins, static_cast<int64_t>(ins.size()));
  int64_t* open = nullptr;
  for (int64_t& size : *sizes) {
    if (size == -1 && open == nullptr) {
      open = &size;
    } else if (size <= 0 || rest % size != 0) {
      return false;
    } else {
      rest /= size;
    }
  }
  if (rest == 0) return false;
  if (open != nullptr) *open = rest;
  return open != nullptr || rest == 1;
}

// The local sizes of a view. A rank's piece of the input is its piece of the view if the dims
// before the two split dims have the same product, and if the split dims have equal sizes or are
// both split evenly.
bool view_sizes(const Out& out, const Sizes& ins, c10::IntArrayRef local_ins,
                SizeArguments* sizes) {
  if (!resolve(ins, &sizes->whole)) return false;
  sizes->local = sizes->whole;
  const auto count = static_cast<int64_t>(sizes->whole.size());
  for (const Out::Source& source : out.sources) {
    if (source.dim >= count) return false;
    const int64_t n = ins[source.along], m = sizes->whole[source.dim];
    if (n == 1 || m == 1 || product(ins, source.along) != product(sizes->whole, source.dim)) {
      return false;
    }
    if (n == m) {
      sizes->local[source.dim] = local_ins[source.along];
    } else if (n % source.parts == 0 && m % source.parts == 0) {
      sizes->local[source.dim] = m / source.parts;
    } else {
      return false;
    }
  }
  return true;
}

// The local sizes of an expand: a split dim must keep its size; new dims and dims of size 1 may get
// any size.
bool expand_sizes(const Out& out, const Sizes& ins, c10::IntArrayRef local_ins,
                  SizeArguments* sizes) {
  sizes->local = sizes->whole;
  const auto count = static_cast<int64_t>(sizes->whole.size());
  const int64_t added = count - static_cast<int64_t>(ins.size());
  if (added < 0) return false;
  for (int64_t d = 0; d < count; ++d) {
    if (sizes->whole[d] == -1 && d >= added) sizes->whole[d] = ins[d - added];
    if (sizes->whole[d] < 0) return false;
  }
  for (const Out::Source& source : out.sources) {
    if (source.dim >= count || sizes->whole[source.dim] != ins[source.along]) return false;
    sizes->local[source.dim] = local_ins[source.along];
  }
  return true;
}

}  // namespace

bool read_sizes(Sizing sizing, const Out& out, const Key& key, const Arguments& given,
                SizeArguments* sizes) {
  if (key.tensors.size() != 1 || !read_given(given, sizes)) return false;
  PyObject* spec = spec_of(key.tensors[0]);
  if (spec == nullptr) {
    PyErr_Clear();  // the slower path meets and raises this error again
    return false;
  }
  const Sizes ins = sizes_of(shape_of(spec));
  const auto local_ins = THPVariable_Unpack(key.tensors[0]).sizes();
  return sizing == Sizing::kView ? view_sizes(out, ins, local_ins, sizes)
                                 : expand_sizes(out, ins, local_ins, sizes);
}

PyObject* local_arguments(const SizeArguments& sizes) {
  const auto count = static_cast<Py_ssize_t>(sizes.local.size());
  PyObject* made = PyTuple_New(count);
  for (Py_ssize_t i = 0; made != nullptr && i < count; ++i) {
    PyObject* size = PyLong_FromLongLong(sizes.local[i]);
    if (size == nullptr) {
      Py_CLEAR(made);
    } else {
      PyTuple_SET_ITEM(made, i, size);
    }
  }
  if (made == nullptr || !sizes.in_sequence) return made;
  PyObject* wrapped = PyTuple_Pack(1, made);
  Py_DECREF(made);
  return wrapped;
}

PyObject* spec_of_output(PyObject* tensor, const Out& out, const Key& key, const Sizes* whole) {
  const at::Tensor& local = THPVariable_Unpack(tensor);
  const at::IntArrayRef from = whole != nullptr ? at::IntArrayRef(*whole) : local.sizes();
  Sizes sizes(from.begin(), from.end());
  if (whole == nullptr) {
    for (const Out::Source& source : out.sources) {
      PyObject* spec = spec_of(key.tensors[source.operand]);
      if (spec == nullptr) return nullptr;
      if (source.dim >= static_cast<int64_t>(sizes.size())) {
        PyErr_Format(PyExc_IndexError, "an output has %zd dims, and dim %lld was planned as split",
                     static_cast<Py_ssize_t>(sizes.size()), static_cast<long long>(source.dim));
        return nullptr;
      }
      PyObject* size = PyTuple_GET_ITEM(shape_of(spec), source.along);
      sizes[source.dim] = PyLong_AsLongLong(size);
    }
  }
  auto* dtype = reinterpret_cast<PyObject*>(torch::getTHPDtype(local.scalar_type()));
  // Most outputs have the spec of an operand, and comparing is cheaper than a call of `laid`.
  for (PyObject* operand : key.tensors) {
    if (Py_TYPE(operand) != global_class()) continue;
    PyObject* spec = spec_of(operand);
    if (spec == nullptr) return nullptr;
    if (layout_of(spec) == out.layout.get() && dtype_of(spec) == dtype &&
        sizes_of(shape_of(spec)) == sizes) {
      return Py_NewRef(spec);
    }
  }
  return make_spec(out.layout.get(), sizes, dtype);
}

}  // namespace consistent::dispatch
