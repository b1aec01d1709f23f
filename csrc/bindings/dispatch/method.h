// The methods of GlobalTensor that go straight to the hook.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// The type Method. Method(base), where `base` is a method of torch.Tensor that asks for hooks, is
// the same method, but calls the hook without parsing the arguments first.
PyTypeObject* method_type();

// (class): makes PySequence_Check false for its instances, as for those of torch.Tensor. A class
// that defines __getitem__ in Python would otherwise count as a sequence.
PyObject* no_sequence(PyObject*, PyObject* type);

}  // namespace consistent::dispatch
