#include "key.h"

#include <c10/util/irange.h>
#include <torch/csrc/autograd/python_variable.h>

namespace consistent::dispatch {
namespace {

enum Kind : uint64_t {
  kSpec = 1,
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
  kUnhashable,
};

PyTypeObject* global_tensor_class = nullptr;
PyTypeObject* mirrored_tensor_class = nullptr;
PyObject* spec_name = nullptr;

uint64_t mix(uint64_t hash, uint64_t value) {
  hash = (hash ^ value) * 0x9E3779B97F4A7C15ull;
  return hash ^ (hash >> 29);
}

uint64_t address(const void* pointer) { return reinterpret_cast<uint64_t>(pointer); }

}  // namespace

void set_classes(PyObject* global_tensor, PyObject* mirrored_tensor) {
  Py_INCREF(global_tensor);
  Py_INCREF(mirrored_tensor);
  global_tensor_class = reinterpret_cast<PyTypeObject*>(global_tensor);
  mirrored_tensor_class = reinterpret_cast<PyTypeObject*>(mirrored_tensor);
  if (spec_name == nullptr) spec_name = PyUnicode_InternFromString("_spec");
}

PyTypeObject* global_class() { return global_tensor_class; }

PyObject* spec_of(PyObject* tensor) {
#if PY_VERSION_HEX < 0x030D0000
  // The instance's own dict, past the look-up in the classes, which know no `_spec`.
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  PyObject* spec = nullptr;
  if (dict != nullptr && *dict != nullptr) spec = PyDict_GetItemWithError(*dict, spec_name);
  if (spec != nullptr) return spec;
  if (PyErr_Occurred()) return nullptr;
#endif
  PyObject* found = PyObject_GetAttr(tensor, spec_name);
  Py_XDECREF(found);  // the tensor holds it
  return found;
}

int is_moved(PyObject* tensor) {
  static PyObject* const name = PyUnicode_InternFromString("_moved_view");
#if PY_VERSION_HEX < 0x030D0000
  PyObject** dict = _PyObject_GetDictPtr(tensor);
  if (dict == nullptr || *dict == nullptr) return 0;
  PyObject* own = PyDict_GetItemWithError(*dict, name);
  return own != nullptr ? own != Py_False : PyErr_Occurred() ? -1 : 0;
#else
  PyObject* found = PyObject_GetAttr(tensor, name);
  if (found == nullptr) return -1;
  Py_DECREF(found);  // the tensor or its class holds it
  return found != Py_False;
#endif
}

PyObject* Arguments::pass_to(PyObject* func) const {
  if (tuple != nullptr) return PyObject_Call(func, tuple, dict);
  return PyObject_Vectorcall(func, values, count, names);
}

PyObject* Arguments::as_tuple() const {
  if (tuple != nullptr) return Py_NewRef(tuple);
  PyObject* made = PyTuple_New(count);
  for (Py_ssize_t i = 0; made != nullptr && i < count; ++i) {
    PyTuple_SET_ITEM(made, i, Py_NewRef(values[i]));
  }
  return made;
}

PyObject* Arguments::as_dict() const {
  if (dict != nullptr) return Py_NewRef(dict);
  PyObject* made = PyDict_New();
  bool done = made != nullptr;
  for (Py_ssize_t i = 0; done && names != nullptr && i < PyTuple_GET_SIZE(names); ++i) {
    done = PyDict_SetItem(made, PyTuple_GET_ITEM(names, i), values[count + i]) == 0;
  }
  if (!done) Py_CLEAR(made);
  return made;
}

bool Arguments::as_tuple_and_dict(PyObject** args, PyObject** kwargs) const {
  *args = as_tuple();
  *kwargs = as_dict();
  if (*args != nullptr && *kwargs != nullptr) return true;
  Py_CLEAR(*args);
  Py_CLEAR(*kwargs);
  return false;
}

Key::~Key() {
  for (PyObject* object : made_) Py_DECREF(object);
}

void Key::hold() {
  for (PyObject* object : objects) made_.push_back(Py_NewRef(object));
  for (PyObject* spec : specs) made_.push_back(Py_NewRef(spec));
}

bool Key::of_call(PyObject* func, const Arguments& given) {
  if (!add_object(func)) return false;
  for (Py_ssize_t i = 0; i < given.count; ++i) {
    if (!add(given.values[i])) return false;
  }
  if (given.names != nullptr && PyTuple_GET_SIZE(given.names) != 0) {
    put(kDict, static_cast<uint64_t>(PyTuple_GET_SIZE(given.names)));
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given.names); ++i) {
      if (!add_object(PyTuple_GET_ITEM(given.names, i)) || !add(given.values[given.count + i])) {
        return false;
      }
    }
  }
  if (given.dict != nullptr && PyDict_GET_SIZE(given.dict) != 0 && !add_dict(given.dict)) {
    return false;
  }
  uint64_t sum = 0;
  for (const Atom& atom : atoms) sum = mix(mix(sum, atom.kind), atom.value);
  hash = sum;
  return true;
}

bool Key::add(PyObject* x) {
  PyTypeObject* type = Py_TYPE(x);
  if (type == global_tensor_class) {
    PyObject* spec = spec_of(x);
    if (spec == nullptr) return false;
    specs.push_back(spec);
    put(kSpec, address(spec));
    if (look_for_ties_ && !tied) {
      const int moved = is_moved(x);
      if (moved < 0) return false;
      tied = moved != 0;
    }
  } else if (type == &PyFloat_Type) {
    put(kFloat, 0);
  } else if (type == &PyLong_Type) {
    int overflow = 0;
    const long long value = PyLong_AsLongLongAndOverflow(x, &overflow);
    if (overflow != 0) return add_object(x);
    put(kInt, static_cast<uint64_t>(value));
  } else if (x == Py_None) {
    put(kNone, 0);
  } else if (type == &PyBool_Type) {
    put(kBool, x == Py_True);
  } else if (type == &PyTuple_Type) {
    return add_tuple(x, kTuple);
  } else if (type == &PyList_Type) {
    // A snapshot: hashing an item may run code that changes the list.
    PyObject* items = PyList_AsTuple(x);
    if (items == nullptr) return false;
    made_.push_back(items);
    return add_tuple(items, kList);
  } else if (type == &PySlice_Type) {
    auto* slice = reinterpret_cast<PySliceObject*>(x);
    put(kSlice, 0);
    return add(slice->start) && add(slice->stop) && add(slice->step);
  } else if (type == &PyDict_Type) {
    return add_dict(x);
  } else if (type == &PyComplex_Type) {
    put(kComplex, 0);
  } else if (THPVariable_Check(x)) {
    return add_tensor(x);
  } else {
    return add_object(x);
  }
  return true;
}

bool Key::add_tuple(PyObject* items, uint64_t kind) {
  const Py_ssize_t count = PyTuple_GET_SIZE(items);
  put(kind, static_cast<uint64_t>(count));
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!add(PyTuple_GET_ITEM(items, i))) return false;
  }
  return true;
}

bool Key::add_dict(PyObject* dict) {
  put(kDict, static_cast<uint64_t>(PyDict_GET_SIZE(dict)));
  PyObject *name = nullptr, *value = nullptr;
  Py_ssize_t position = 0;
  while (PyDict_Next(dict, &position, &name, &value)) {
    if (!add_object(name) || !add(value)) return false;
  }
  return true;
}

// A plain tensor counts as broadcast: its shape, dtype and device type say how.
bool Key::add_tensor(PyObject* x) {
  const at::Tensor& tensor = THPVariable_Unpack(x);
  const auto described = static_cast<uint64_t>(tensor.scalar_type()) |
                         static_cast<uint64_t>(static_cast<uint8_t>(tensor.device().type())) << 16 |
                         static_cast<uint64_t>(tensor.dim()) << 32;
  put(Py_TYPE(x) == mirrored_tensor_class ? kMirrored : kTensor, described);
  if (tensor.unsafeGetTensorImpl()->has_symbolic_sizes_strides()) return add_object(x);
  for (const int64_t size : tensor.sizes()) put(kInt, static_cast<uint64_t>(size));
  return true;
}

// Numbers that Python holds equal but torch treats apart (1, True, a numpy 1) differ in type.
bool Key::add_object(PyObject* x) {
  Py_hash_t found = PyObject_Hash(x);
  uint64_t kind = address(Py_TYPE(x));  // above all kinds: an address
  if (found == -1) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) return false;
    PyErr_Clear();
    PyObject* shown = PyObject_Repr(x);
    if (shown == nullptr) return false;
    made_.push_back(shown);
    found = PyObject_Hash(shown);
    kind ^= kUnhashable << 60;
    x = shown;
  }
  put(kind, static_cast<uint64_t>(found));
  objects.push_back(x);
  return true;
}

}  // namespace consistent::dispatch
