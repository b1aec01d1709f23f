// Functions that read attributes of Python objects. Each returns false with a Python error set on
// failure.

#pragma once

#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstdint>

namespace consistent::dispatch {

// `value` owns the attribute, or is null.
inline bool read_object(PyObject* from, const char* name, THPObjectPtr* value) {
  *value = PyObject_GetAttrString(from, name);
  return value->get() != nullptr;
}

inline bool read_bool(PyObject* from, const char* name, bool* value) {
  THPObjectPtr found(PyObject_GetAttrString(from, name));
  if (!found) return false;
  const int is = PyObject_IsTrue(found.get());
  *value = is == 1;
  return is >= 0;
}

inline bool read_int(PyObject* from, const char* name, int64_t* value) {
  THPObjectPtr found(PyObject_GetAttrString(from, name));
  if (!found) return false;
  *value = PyLong_AsLongLong(found.get());
  return *value != -1 || !PyErr_Occurred();
}

}  // namespace consistent::dispatch
