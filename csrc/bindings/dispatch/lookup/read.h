// Functions that read attributes of Python objects. Each returns false with a Python error set on
// failure.

#pragma once

#include <Python.h>

#include <cstdint>

namespace consistent::dispatch {

// `value` becomes a new reference, or null.
inline bool read_object(PyObject* from, const char* name, PyObject** value) {
  *value = PyObject_GetAttrString(from, name);
  return *value != nullptr;
}

inline bool read_bool(PyObject* from, const char* name, bool* value) {
  PyObject* found = PyObject_GetAttrString(from, name);
  if (found == nullptr) return false;
  const int is = PyObject_IsTrue(found);
  Py_DECREF(found);
  *value = is == 1;
  return is >= 0;
}

inline bool read_int(PyObject* from, const char* name, int64_t* value) {
  PyObject* found = PyObject_GetAttrString(from, name);
  if (found == nullptr) return false;
  *value = PyLong_AsLongLong(found);
  Py_DECREF(found);
  return *value != -1 || !PyErr_Occurred();
}

}  // namespace consistent::dispatch
