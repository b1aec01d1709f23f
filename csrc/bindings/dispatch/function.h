// Makes functions of torch go straight to the hook.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// From now on `function`, a builtin of torch that asks for hooks, calls the hook without parsing
// its arguments if the first one is a global tensor or a list that begins with one. It stays the
// same object, so whatever refers to it by identity or name still works. Returns false, and changes
// nothing, if `function` has another calling convention.
bool enter_function(PyObject* function);

}  // namespace consistent::dispatch
