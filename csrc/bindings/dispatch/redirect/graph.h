// Whether an autograd graph contains global tensors.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// Whether backward from `roots` (a tensor, or a sequence of tensors) reaches a leaf that is a
// global tensor, or a node of this library that communicates.
bool reaches_global(PyObject* roots);

}  // namespace consistent::dispatch
