// Planning is invisible: no mode, hook or profiler of the user sees it.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// () -> the state of this thread. Switches off what was on, except autocast.
PyObject* set_aside(PyObject*, PyObject*);

// (state from set_aside): restores it.
PyObject* bring_back(PyObject*, PyObject* before);

// The name of what records the op about to run instead of running it, or nullptr: a FakeTensorMode,
// a tracer of graphs, functionalization or torch.jit.trace.
const char* recorder();

}  // namespace consistent::dispatch
