// Whether a value is, or holds, a global tensor.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// Also looks into tuples, lists and dicts, to any depth that torch looks into. False for nullptr.
bool holds(PyObject* value);

// Whether this thread calls the hooks of subclasses; inside the library, on shards, it does not.
bool hooks_are_on();

// (value) -> bool
PyObject* holds_global(PyObject*, PyObject* value);

}  // namespace consistent::dispatch
