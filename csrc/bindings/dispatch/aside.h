// Switches off the user's modes, hooks and profilers while a call is planned, so that they do not
// see the ops of planning.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// () -> the state of this thread. Then switches everything off except autocast, on which dtypes
// depend.
PyObject* set_aside(PyObject*, PyObject*);

// (state from set_aside): restores it.
PyObject* bring_back(PyObject*, PyObject* before);

// The name of the mode that would record the next op instead of running it, or null:
// FakeTensorMode, a graph tracer, functionalization or torch.jit.trace.
const char* recorder();

}  // namespace consistent::dispatch
