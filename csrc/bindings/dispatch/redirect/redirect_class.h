// The same as redirect.h for classes: without it torch.Tensor(x) would read the shard of x.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (class, handler): from now on the handler makes instances of the class and its subclasses if an
// argument is, or holds, a global tensor. Its first argument is the class.
PyObject* redirect_class(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace consistent::dispatch
