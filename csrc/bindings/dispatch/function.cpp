#include "function.h"

#include <torch/csrc/Exceptions.h>

#include "hook.h"

namespace consistent::dispatch {
namespace {

// The calling convention of torch's functions. They have no vectorcall, so without one of ours
// CPython makes a tuple and a dict for each call.
constexpr int kForm = METH_VARARGS | METH_KEYWORDS;

bool is_global(PyObject* x) { return Py_TYPE(x) == global_class(); }

bool begins_global(PyObject* x) {
  if (PyList_CheckExact(x)) return PyList_GET_SIZE(x) != 0 && is_global(PyList_GET_ITEM(x, 0));
  if (PyTuple_CheckExact(x)) return PyTuple_GET_SIZE(x) != 0 && is_global(PyTuple_GET_ITEM(x, 0));
  return is_global(x);
}

PyObject* straight(PyObject* function, const Arguments& given) {
  HANDLE_TH_ERRORS
  return call(function, given);
  END_HANDLE_TH_ERRORS
}

// Calls torch's C function, as CPython would without our vectorcall.
PyObject* as_torch_does(PyObject* function, const Arguments& given) {
  THPObjectPtr args = given.as_tuple(), kwargs;
  if (given.names != nullptr) kwargs = given.as_dict();
  if (!args || (!kwargs && given.names != nullptr)) return nullptr;
  return PyCFunction_Type.tp_call(function, args.get(), kwargs.get());
}

PyObject* function_call(PyObject* function, PyObject* const* values, size_t counted,
                        PyObject* names) {
  const Arguments given(values, PyVectorcall_NARGS(counted), names);
  const bool ours = given.count != 0 && begins_global(values[0]) && hook_is_on();
  return ours ? straight(function, given) : as_torch_does(function, given);
}

}  // namespace

bool enter_function(PyObject* function) {
  if (!PyCFunction_CheckExact(function) || (PyCFunction_GET_FLAGS(function) & kForm) != kForm) {
    return false;
  }
  reinterpret_cast<PyCFunctionObject*>(function)->vectorcall = function_call;
  return true;
}

}  // namespace consistent::dispatch
