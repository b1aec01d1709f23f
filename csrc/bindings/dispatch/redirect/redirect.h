// Functions of torch that never ask __torch_function__ are caught where they are made: a function
// gets a vectorcall, and the C function behind a method is replaced by ours. The Python object
// stays the one that scripts, pickles, dicts and earlier imports hold.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (callable) -> torch's own function as another object, which is not redirected.
PyObject* original(PyObject*, PyObject* callable);

// (callable, handler, when, after): from now on calls go to the handler. For a method the instance
// or class is its first argument. `when` is one of
//   "always"
//   "global"  an argument is, or holds, a global tensor, and hooks are not off
//   "graph"   as "global", or the graph behind the first argument reaches global tensors
// Other calls are torch's. If the result of one holds a global tensor and `after` is not None, then
// after(result, *arguments) is the result; this works only for builtins that take keywords.
PyObject* redirect(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace consistent::dispatch
