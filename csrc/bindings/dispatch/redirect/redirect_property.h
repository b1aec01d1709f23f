// Redirects properties of torch's tensors to which a tensor can be assigned (x.data = y): torch
// calls the hook for the owner x only, not for the value y.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (property, handler): if a global tensor is assigned to the property of a plain tensor, it calls
// handler(owner, value) and ignores the result. For a global owner, torch itself calls the hook.
PyObject* redirect_property(PyObject*, PyObject* const* args, Py_ssize_t n);

}  // namespace consistent::dispatch
