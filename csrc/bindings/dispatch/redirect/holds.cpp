#include "holds.h"

#include <ATen/PythonTorchFunctionTLS.h>

#include "../lookup/key.h"

namespace consistent::dispatch {
namespace {

constexpr int kDeepest = 64;  // torch.tensor refuses deeper lists; a list may contain itself

bool holds_to(PyObject* x, int depth) {
  if (x == nullptr) return false;
  if (Py_TYPE(x) == global_class()) return true;
  if (depth == 0) return false;
  if (PyTuple_Check(x) || PyList_Check(x)) {
    PyObject** items = PySequence_Fast_ITEMS(x);
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(x); ++i) {
      if (holds_to(items[i], depth - 1)) return true;
    }
  } else if (PyDict_Check(x)) {
    PyObject *key = nullptr, *value = nullptr;
    for (Py_ssize_t i = 0; PyDict_Next(x, &i, &key, &value);) {
      if (holds_to(value, depth - 1)) return true;
    }
  }
  return false;
}

}  // namespace

bool holds(PyObject* value) { return holds_to(value, kDeepest); }

bool hooks_are_on() {
  return at::impl::PythonTorchFunctionTLS::get_disabled_state() ==
         at::impl::TorchFunctionDisabledState::ENABLED;
}

PyObject* holds_global(PyObject*, PyObject* value) { return PyBool_FromLong(holds(value)); }

}  // namespace consistent::dispatch
