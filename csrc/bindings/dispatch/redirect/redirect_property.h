// Properties of torch's tensors that take a tensor but ask for hooks of their owner only.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (property, handler): if a global tensor is assigned to it, handler(owner, value) is called and
// its result ignored. For a global owner torch itself asks the hook.
PyObject* redirect_property(PyObject*, PyObject* const* args, Py_ssize_t n);

}  // namespace consistent::dispatch
