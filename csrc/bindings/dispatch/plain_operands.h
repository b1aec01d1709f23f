// Plain tensors among the arguments of a call: each rank has its own, and they count as broadcast.

#pragma once

#include <Python.h>

#include "lookup/key.h"

namespace consistent::dispatch {

// Whether torch may be called with the plain tensors of the call as they are: autograd records none
// of them, none belongs to a transform of torch.func, and check mode is off. -1 with a Python error
// set.
int may_stay_plain(const Key& key);

// Whether `out`, the result of an op, is or contains one of the plain tensors among the arguments.
bool returns_plain_operand(PyObject* out, const Key& key);

}  // namespace consistent::dispatch
