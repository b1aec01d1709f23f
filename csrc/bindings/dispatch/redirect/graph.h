// Whether an autograd graph contains global tensors.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// Whether backward from `roots`, a tensor or a sequence of tensors, reaches leaves that are global
// tensors, or nodes of this library that communicate.
bool reaches_global(PyObject* roots);

}  // namespace consistent::dispatch
