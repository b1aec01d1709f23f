// Redirects functions of torch that do not support __torch_function__. The Python object is changed
// in place: a function gets a vectorcall of ours, and the C function behind a method is replaced by
// ours. So the object stays the one that scripts, pickles, dicts and earlier imports hold.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (callable) -> another object that calls torch's function and is not redirected. Make it before
// redirect(): it copies the method definition as it is now.
PyObject* original(PyObject*, PyObject* callable);

// (callable, handler, when, after): from now on calls go to the handler. For a method the instance
// or class is its first argument. `when` is one of
//   "always"
//   "global"  an argument is, or holds, a global tensor, and hooks are not off
//   "graph"   as "global", or the graph behind the first argument reaches global tensors
// All other calls go to torch. If the result of such a call holds a global tensor and `after` is
// not None, the result is replaced by after(result, *arguments). This is implemented only for
// methods with METH_VARARGS, with or without keywords.
PyObject* redirect(PyObject*, PyObject* const* args, Py_ssize_t count);

}  // namespace consistent::dispatch
