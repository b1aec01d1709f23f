// Functions of torch that go straight to the hook.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// From now on `function`, a builtin of torch that asks for hooks, does not parse the arguments
// first to find out that there is one: where the first of them is a global tensor, or a list that
// begins with one, it calls the hook. It stays the same object, so that all who know it by identity
// or by name still do. False where it has another form, and is left as it is.
bool enter_function(PyObject* function);

}  // namespace consistent::dispatch
