// The same as redirect.h for classes. Without it, torch.Tensor(x) would read the shard of x.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (class, handler): from now on, instances of the class and its subclasses are made by
// handler(class, *args, **kwargs) if an argument is, or holds, a global tensor.
PyObject* redirect_class(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace consistent::dispatch
