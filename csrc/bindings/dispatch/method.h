// Methods of GlobalTensor that go straight to the hook.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// The type of Method(base), `base` a method of torch.Tensor that asks for hooks: the same method,
// which does not let torch parse the arguments first to find out that there is one.
PyTypeObject* method_type();

}  // namespace consistent::dispatch
