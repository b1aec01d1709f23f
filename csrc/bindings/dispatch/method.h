// Methods of GlobalTensor that call the hook directly.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// The type Method. Method(base), where `base` is a method of torch.Tensor that supports
// __torch_function__, behaves as `base` but calls the hook before the arguments are parsed.
PyTypeObject* method_type();

// (class): makes PySequence_Check false for instances of the class, as it is for those of
// torch.Tensor. Otherwise a class that defines __getitem__ in Python would count as a sequence.
PyObject* no_sequence(PyObject*, PyObject* type);

}  // namespace consistent::dispatch
