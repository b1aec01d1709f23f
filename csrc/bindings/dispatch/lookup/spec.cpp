#include "spec.h"

#include <structmember.h>
#include <torch/csrc/Size.h>

namespace consistent::dispatch {
namespace {

Py_ssize_t layout_at = 0, shape_at = 0, dtype_at = 0, is_whole_at = 0, parts_at = 0;
PyObject* laid = nullptr;  // TensorSpec.laid
PyTypeObject* spec_class = nullptr;

// The offset of a slot in the objects of `type`; false with a Python error set.
bool find_slot(PyObject* type, const char* name, Py_ssize_t* offset) {
  PyObject* descriptor = PyObject_GetAttrString(type, name);
  if (descriptor == nullptr) return false;
  const bool is_slot = Py_TYPE(descriptor) == &PyMemberDescr_Type;
  if (is_slot) {
    *offset = reinterpret_cast<PyMemberDescrObject*>(descriptor)->d_member->offset;
  } else {
    PyErr_Format(PyExc_TypeError, "%R has no slot %s", type, name);
  }
  Py_DECREF(descriptor);
  return is_slot;
}

// Borrowed. The objects are immutable, so a slot keeps its value as long as the object lives.
PyObject* slot(PyObject* object, Py_ssize_t offset) {
  return *reinterpret_cast<PyObject**>(reinterpret_cast<char*>(object) + offset);
}

}  // namespace

bool set_spec_classes(PyObject* tensor_spec, PyObject* layout) {
  Py_XDECREF(laid);
  spec_class = reinterpret_cast<PyTypeObject*>(tensor_spec);
  laid = PyObject_GetAttrString(tensor_spec, "laid");
  return laid != nullptr && find_slot(tensor_spec, "layout", &layout_at) &&
         find_slot(tensor_spec, "shape", &shape_at) && find_slot(tensor_spec, "dtype", &dtype_at) &&
         find_slot(layout, "is_whole", &is_whole_at) && find_slot(layout, "parts", &parts_at);
}

bool is_spec(PyObject* object) { return Py_TYPE(object) == spec_class; }
PyObject* layout_of(PyObject* spec) { return slot(spec, layout_at); }
PyObject* shape_of(PyObject* spec) { return slot(spec, shape_at); }
PyObject* dtype_of(PyObject* spec) { return slot(spec, dtype_at); }
bool is_whole(PyObject* layout) { return slot(layout, is_whole_at) == Py_True; }
PyObject* parts_of(PyObject* layout) { return slot(layout, parts_at); }

Sizes sizes_of(PyObject* shape) {
  Sizes sizes;
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(shape); ++i) {
    sizes.push_back(PyLong_AsLongLong(PyTuple_GET_ITEM(shape, i)));
  }
  return sizes;
}

PyObject* make_spec(PyObject* layout, c10::ArrayRef<int64_t> sizes, PyObject* dtype) {
  const auto count = static_cast<Py_ssize_t>(sizes.size());
  PyObject* shape = THPSizeType.tp_alloc(&THPSizeType, count);
  if (shape == nullptr) return nullptr;
  for (Py_ssize_t i = 0; i < count; ++i) {
    PyObject* size = PyLong_FromLongLong(sizes[i]);
    if (size == nullptr) {
      Py_DECREF(shape);
      return nullptr;
    }
    PyTuple_SET_ITEM(shape, i, size);
  }
  PyObject* made = PyObject_CallFunctionObjArgs(laid, layout, shape, dtype, nullptr);
  Py_DECREF(shape);
  return made;
}

}  // namespace consistent::dispatch
