// Whether a value is, or contains, a global tensor.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// Looks into tuples, lists and the values of dicts, as deep as torch does. False for null.
bool holds(PyObject* value);

// Whether __torch_function__ of subclasses is enabled in this thread. Inside this library, where
// ops run on shards, it is disabled.
bool hooks_are_on();

// (value) -> bool
PyObject* holds_global(PyObject*, PyObject* value);

}  // namespace consistent::dispatch
