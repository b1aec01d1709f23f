#include "plain_operands.h"

#include <c10/core/DispatchKeySet.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/autograd/python_variable.h>

#include <algorithm>

#include "hook.h"

namespace consistent::dispatch {

int may_stay_plain(const Key& key) {
  constexpr c10::DispatchKeySet kTransforms({c10::DispatchKey::FuncTorchBatched,
                                             c10::DispatchKey::FuncTorchGradWrapper,
                                             c10::DispatchKey::Functionalize});
  const bool recorded = at::GradMode::is_enabled() && !c10::InferenceMode::is_enabled();
  for (PyObject* x : key.tensors) {
    if (Py_TYPE(x) == global_class()) continue;
    if (!THPVariable_CheckExact(x)) return 0;
    const at::Tensor& tensor = THPVariable_Unpack(x);
    if ((recorded && tensor.requires_grad()) || tensor.key_set().has_any(kTransforms)) return 0;
  }
  static PyObject* const enabled = PyUnicode_InternFromString("enabled");
  PyObject* checks = PyObject_GetAttr(python.check_mode, enabled);
  if (checks == nullptr) return -1;
  const int on = PyObject_IsTrue(checks);
  Py_DECREF(checks);
  return on < 0 ? -1 : on == 0;
}

bool returns_plain_operand(PyObject* out, const Key& key) {
  if (PyTuple_Check(out) || PyList_Check(out)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i) {
      if (returns_plain_operand(PySequence_Fast_GET_ITEM(out, i), key)) return true;
    }
    return false;
  }
  return Py_TYPE(out) != global_class() &&
         std::find(key.tensors.begin(), key.tensors.end(), out) != key.tensors.end();
}

}  // namespace consistent::dispatch
