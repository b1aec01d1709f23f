// Makes functions of torch go straight to the hook.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// From now on, `function` (a builtin of torch that supports __torch_function__) calls the hook
// before it parses its arguments, if the first argument is a global tensor or a list that begins
// with one. It stays the same object, so references to it by identity or name still work. Returns
// false, and changes nothing, if `function` has another calling convention.
bool enter_function(PyObject* function);

}  // namespace consistent::dispatch
