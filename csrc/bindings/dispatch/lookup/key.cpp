#include "key.h"

#include <ATen/autocast_mode.h>
#include <c10/core/DefaultDtype.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cmath>
#include <cstring>

#include "../hook.h"
#include "spec.h"

namespace consistent::dispatch {
namespace {

enum Kind : uint64_t {
  kFunction = 1,
  kSpec,
  kLayout,
  kStorage,
  kSizes,
  kInt,
  kBool,
  kFloat,
  kComplex,
  kNone,
  kTuple,
  kList,
  kDict,
  kSlice,
  kTensor,
  kMirrored,
  kFloatValue,
  kTracked,
  kAutocast,
  kDefaultDtype,
};

// The dims whose size classes (two bits each) fit into one atom, below the number of dims.
constexpr Py_ssize_t kMostDims = 24;

PyTypeObject* global_tensor_class = nullptr;
PyTypeObject* mirrored_tensor_class = nullptr;
PyObject* spec_name = nullptr;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

// Whether a float or a complex number is 0, and whether it is finite.
uint64_t kind_of(double real, double imaginary = 0) {
  if (!std::isfinite(real) || !std::isfinite(imaginary)) return 2;
  return real == 0 && imaginary == 0 ? 1 : 0;
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

// The attribute `_spec`, of any type, borrowed.
PyObject* spec_attribute(PyObject* tensor) {
#if PY_VERSION_HEX < 0x030D0000
  // Reads the instance's own dict and skips the look-up in the classes, which have no `_spec`.
  // Python 3.13 may store attributes inline, without a dict.
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  PyObject* spec = nullptr;
  if (dict != nullptr && *dict != nullptr) spec = PyDict_GetItemWithError(*dict, spec_name);
  if (spec != nullptr) return spec;
  if (PyErr_Occurred()) return nullptr;
#endif
  THPObjectPtr found(PyObject_GetAttr(tensor, spec_name));
  return found.get();  // borrowed: the tensor still holds it
}

}  // namespace

void set_classes(PyObject* global_tensor, PyObject* mirrored_tensor) {
  // Never released: the types are needed until the process ends.
  Py_INCREF(global_tensor);
  Py_INCREF(mirrored_tensor);
  global_tensor_class = reinterpret_cast<PyTypeObject*>(global_tensor);
  mirrored_tensor_class = reinterpret_cast<PyTypeObject*>(mirrored_tensor);
  if (spec_name == nullptr) spec_name = PyUnicode_InternFromString("_spec");
}

PyTypeObject* global_class() { return global_tensor_class; }

PyObject* spec_of(PyObject* tensor) {
  PyObject* spec = spec_attribute(tensor);
  if (spec == nullptr || is_spec(spec)) return spec;
  PyErr_Format(
      PyExc_TypeError,
      "the _spec of a global tensor is of type %.200s, and not a TensorSpec, which says "
      "how ranks hold the tensor. Do not set it: x.to_global(placement, sbp) gives another "
      "layout.",
      Py_TYPE(spec)->tp_name);
  return nullptr;
}

int is_moved(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_moved_view");
#if PY_VERSION_HEX < 0x030D0000
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  if (dict == nullptr || *dict == nullptr) return 0;
  PyObject* own = PyDict_GetItemWithError(*dict, name);
  return own != nullptr ? own != Py_False : PyErr_Occurred() ? -1 : 0;
#else
  THPObjectPtr found(PyObject_GetAttr(tensor, name));
  if (!found) return -1;
  return found.get() != Py_False;
#endif
}

size_t Arguments::tensors_on_top() const {
  size_t found = 0;
  for (Py_ssize_t i = 0; i < all(); ++i) found += THPVariable_Check(values[i]) ? 1 : 0;
  return found;
}

PyObject* Arguments::pass_to(PyObject* func) const {
  if (tuple != nullptr) return PyObject_Call(func, tuple, dict);
  return PyObject_Vectorcall(func, values, count, names);
}

THPObjectPtr Arguments::as_tuple() const {
  if (tuple != nullptr) return THPObjectPtr(Py_NewRef(tuple));
  THPObjectPtr made(PyTuple_New(count));
  for (Py_ssize_t i = 0; made && i < count; ++i) {
    PyTuple_SET_ITEM(made.get(), i, Py_NewRef(values[i]));
  }
  return made;
}

THPObjectPtr Arguments::as_dict() const {
  if (dict != nullptr) return THPObjectPtr(Py_NewRef(dict));
  THPObjectPtr made(PyDict_New());
  for (Py_ssize_t i = 0; made && names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* name = PyTuple_GET_ITEM(names, i);
    if (PyDict_SetItem(made.get(), name, values[count + i]) != 0) made = nullptr;
  }
  return made;
}

bool Arguments::as_tuple_and_dict(THPObjectPtr* args, THPObjectPtr* kwargs) const {
  *args = as_tuple();
  *kwargs = as_dict();
  return *args && *kwargs;
}

void Key::hold() {
  for (PyObject* object : objects) made_.emplace_back(Py_NewRef(object));
  for (PyObject* object : held) made_.emplace_back(Py_NewRef(object));
}

bool Key::of_call(PyObject* func, const Arguments& given) {
  if (!add_call(func, nullptr, given)) return false;
  finish();
  return true;
}

bool Key::of_any_size(PyObject* func, const Function& function, const Arguments& given,
                      const Key& exact) {
  mode_ = Mode::kWhole;
  for (PyObject* tensor : exact.tensors) {
    if (Py_TYPE(tensor) != global_tensor_class) continue;
    PyObject* spec = spec_of(tensor);
    if (spec == nullptr) return false;
    if (!is_whole(layout_of(spec))) mode_ = Mode::kAnySize;
  }
  if (!add_call(func, &function, given)) return false;
  finish();
  return true;
}

bool Key::add_facts(const Arguments& given, bool values, bool tracked) {
  for (Py_ssize_t i = 0; values && i < given.count; ++i) {
    if (!add_floats(given.values[i])) return false;
  }
  for (Py_ssize_t i = 0; values && given.names && i < PyTuple_GET_SIZE(given.names); ++i) {
    if (!add_floats(given.values[given.count + i])) return false;
  }
  if (values && given.dict != nullptr && !add_floats(given.dict)) return false;
  if (tracked) put(kTracked, asks_for_gradients(tensors));
  if (PyErr_Occurred()) return false;
  finish();
  return true;
}

void Key::finish() {
  uint64_t sum = 0;
  for (const Atom& atom : atoms) sum = mix(mix(sum, atom.kind), atom.value);
  hash = sum;
}

bool Key::add_call(PyObject* func, const Function* function, const Arguments& given) {
  put(kFunction, address(func));
  add_autocast(at::kCPU);
  add_autocast(at::kCUDA);
  add_default_dtype();
  held.push_back(func);
  const bool all_free = mode_ == Mode::kWhole;
  for (Py_ssize_t i = 0; i < given.count; ++i) {
    const bool free = all_free || (function != nullptr && function->is_free(i));
    if (!add(given.values[i], free)) return false;
  }
  if (given.names != nullptr && PyTuple_GET_SIZE(given.names) != 0) {
    put(kDict, static_cast<uint64_t>(PyTuple_GET_SIZE(given.names)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.names); ++i) {
      PyObject* name = PyTuple_GET_ITEM(given.names, i);
      const bool free = all_free || (function != nullptr && function->is_free(name));
      if (!add_object(name) || !add(given.values[given.count + i], free)) return false;
    }
  }
  return given.dict == nullptr || PyDict_GET_SIZE(given.dict) == 0 ||
         add_dict(given.dict, kDict, function);
}

// Adds the autocast dtype: under autocast an op may return another dtype.
void Key::add_autocast(at::DeviceType device) {
  if (!at::autocast::is_autocast_enabled(device)) return;
  put(kAutocast, static_cast<uint64_t>(device) << 16 |
                     static_cast<uint64_t>(at::autocast::get_autocast_dtype(device)));
}

// Adds the default dtype if it is not float32, with which torch starts: results of true division of
// integers, for example, have this dtype.
void Key::add_default_dtype() {
  const auto dtype = c10::get_default_dtype_as_scalartype();
  if (dtype != at::kFloat) put(kDefaultDtype, static_cast<uint64_t>(dtype));
}

bool Key::add(PyObject* x, bool free) {
  PyTypeObject* type = Py_TYPE(x);
  if (type == global_tensor_class) return add_global(x);
  if (type == &PyFloat_Type) {
    put(kFloat, kind_of(PyFloat_AS_DOUBLE(x)));
  } else if (type == &PyLong_Type) {
    return add_int(x, free);
  } else if (x == Py_None) {
    put(kNone, 0);
  } else if (type == &PyBool_Type) {
    put(kBool, x == Py_True);
  } else if (PyTuple_Check(x)) {
    return add_tuple(x, type == &PyTuple_Type ? static_cast<uint64_t>(kTuple) : address(type),
                     free);
  } else if (PyList_Check(x)) {
    return add_list(x, type == &PyList_Type ? static_cast<uint64_t>(kList) : address(type), free);
  } else if (type == &PySlice_Type) {
    auto* slice = reinterpret_cast<PySliceObject*>(x);
    put(kSlice, 0);
    return add(slice->start, free) && add(slice->stop, free) && add(slice->step, free);
  } else if (PyDict_Check(x)) {
    return add_dict(x, type == &PyDict_Type ? static_cast<uint64_t>(kDict) : address(type),
                    nullptr);
  } else if (type == &PyComplex_Type) {
    put(kComplex, kind_of(PyComplex_RealAsDouble(x), PyComplex_ImagAsDouble(x)));
  } else if (THPVariable_Check(x)) {
    return add_plain(x);
  } else {
    return add_object(x);
  }
  return true;
}

bool Key::add_int(PyObject* number, bool free) {
  int overflow = 0;
  const long long value = PyLong_AsLongLongAndOverflow(number, &overflow);
  if (free) {
    put(kInt, value == 0);  // for an int that overflows, `value` is -1
    return true;
  }
  if (overflow != 0) return add_object(number);
  put(kInt, static_cast<uint64_t>(value));
  return true;
}

bool Key::add_list(PyObject* list, uint64_t kind, bool free) {
  // A snapshot: hashing an item may run Python code that changes the list. The key owns it, since
  // the items may then be held by nothing else.
  PyObject* items = PyList_AsTuple(list);
  if (items == nullptr) return false;
  made_.emplace_back(items);
  return add_tuple(items, kind, free);
}

bool Key::add_tuple(PyObject* items, uint64_t kind, bool free) {
  const Py_ssize_t count = PyTuple_GET_SIZE(items);
  put(kind, static_cast<uint64_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!add(PyTuple_GET_ITEM(items, i), free)) return false;
  }
  return true;
}

bool Key::add_dict(PyObject* dict, uint64_t kind, const Function* function) {
  put(kind, static_cast<uint64_t>(PyDict_GET_SIZE(dict)));
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &name, &value)) {
    const bool named = function != nullptr && PyUnicode_Check(name) && function->is_free(name);
    if (!add_object(name) || !add(value, named || mode_ == Mode::kWhole)) return false;
  }
  return true;
}

bool Key::add_global(PyObject* x) {
  PyObject* spec = spec_of(x);
  if (spec == nullptr) return false;
  tensors.push_back(x);
  if (look_for_moved_ && !moved) {
    const int found = is_moved(x);
    if (found < 0) return false;
    moved = found != 0;
  }
  // Ranks outside a placement follow ops of sparse tensors in another way.
  const auto storage = THPVariable_Unpack(x).layout();
  if (storage != at::kStrided) put(kStorage, static_cast<uint64_t>(storage));
  if (mode_ == Mode::kExact) {
    held.push_back(spec);
    put(kSpec, address(spec));
    return true;
  }
  PyObject *layout = layout_of(spec), *dtype = dtype_of(spec);
  held.push_back(layout);
  put(kLayout, address(layout));
  put(kLayout, address(dtype));  // not in `held`: dtypes are never freed
  return mode_ == Mode::kWhole || add_sizes(sizes_of(shape_of(spec)), sizes_of(parts_of(layout)));
}

// Adds, for each dim, whether its size is 0, 1, or less than the number of parts, so that some rank
// has no item of it. If there are more than kMostDims dims, adds the sizes themselves.
bool Key::add_sizes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> parts) {
  uint64_t seen = sizes.size() << 48;
  if (sizes.size() > kMostDims) {
    for (const int64_t size : sizes) put(kInt, static_cast<uint64_t>(size));
  } else {
    for (size_t i = 0; i < sizes.size(); ++i) {
      const bool is_short = i < parts.size() && sizes[i] < parts[i];
      const uint64_t kind = sizes[i] == 0 ? 1 : sizes[i] == 1 ? 2 : is_short ? 3 : 0;
      seen |= kind << (2 * i);
    }
  }
  put(kSizes, seen);
  return true;
}

// Adds a plain tensor, which counts as broadcast, by its shape, dtype and device type.
bool Key::add_plain(PyObject* x) {
  tensors.push_back(x);
  const at::Tensor& tensor = THPVariable_Unpack(x);
  const auto described = static_cast<uint64_t>(tensor.scalar_type()) |
                         static_cast<uint64_t>(static_cast<uint8_t>(tensor.device().type())) << 16 |
                         static_cast<uint64_t>(tensor.dim()) << 32;
  put(Py_TYPE(x) == mirrored_tensor_class ? kMirrored : kTensor, described);
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return add_object(x);
  if (mode_ == Mode::kAnySize) return add_sizes(tensor.sizes(), {});
  for (const int64_t size : tensor.sizes()) {
    if (mode_ == Mode::kExact) put(kInt, static_cast<uint64_t>(size));
  }
  return true;
}

// Adds an object with its type: Python compares 1, True and a numpy 1 as equal, but torch treats
// them differently.
bool Key::add_object(PyObject* x) {
  const Py_hash_t found = PyObject_Hash(x);
  if (found == -1) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyErr_Clear();
    lasting = false;  // an unhashable object (a numpy array) may change: each call is planned
    return true;
  }
  put(address(Py_TYPE(x)), static_cast<uint64_t>(found));  // an address is larger than any Kind
  objects.push_back(x);
  return true;
}

// Adds the values of the floats and complex numbers in `x`, in order.
bool Key::add_floats(PyObject* x) {
  if (PyFloat_CheckExact(x)) {
    const double value = PyFloat_AS_DOUBLE(x);
    uint64_t bits = 0;
    std::memcpy(&bits, &value, sizeof(bits));
    put(kFloatValue, bits);
  } else if (PyComplex_CheckExact(x)) {
    return add_object(x);
  } else if (PyTuple_Check(x)) {
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(x); ++i) {
      if (!add_floats(PyTuple_GET_ITEM(x, i))) return false;
    }
  } else if (PyList_Check(x)) {
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(x); ++i) {
      if (!add_floats(PyList_GET_ITEM(x, i))) return false;
    }
  } else if (PyDict_Check(x)) {
    PyObject *name = nullptr, *value = nullptr;
    Py_ssize_t position = 0;
    while (PyDict_Next(x, &position, &name, &value)) {
      if (!add_floats(value)) return false;
    }
  }
  return true;
}

}  // namespace consistent::dispatch
