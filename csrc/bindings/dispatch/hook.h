// The __torch_function__ hook of GlobalTensor.

#pragma once

#include <Python.h>

#include "lookup/key.h"
#include "lookup/plans.h"

namespace consistent::dispatch {

// Python objects that the hot path uses for what it cannot do itself. Set once, from Python, and
// never released: the references are owned, but these are globals that outlive the interpreter.
struct Python {
  PyObject* resolve = nullptr;    // (func) -> TorchFunction
  PyObject* make_plan = nullptr;  // (TorchFunction, args, kwargs, by_facts, for_any_size) -> Plan
  PyObject* moved_view_error = nullptr;  // (name) -> exception
  PyObject* op_tracers = nullptr;        // a list: while it is not empty, Python runs all plans
  PyObject* moved_views = nullptr;  // a list: while it is not empty, operands may be moved views
  PyObject* freshened = nullptr;    // (args, kwargs) -> the same with fresh views, or None
  PyObject* wrote = nullptr;        // (tensor): called before a write while there are moved views
  PyObject* forward_ad = nullptr;   // torch.autograd.forward_ad
  PyObject* check_mode = nullptr;   // the module of check mode, with a bool `enabled`
  PyObject* count_lack = nullptr;   // (error): called with every exception that an op raises
};
extern Python python;

// The type of bound property getters, such as torch.Tensor.shape.__get__ (method-wrapper). Set when
// the module is loaded, because the headers of Python 3.13 do not name the type.
extern PyTypeObject* getter_type;

// The tables in which the hook looks up plans: one by exact keys, one by general keys (key.h).
struct Tables {
  explicit Tables(size_t most) : exact(most), any_size(most) {}
  PlanTable exact, any_size;
  bool plan_each = false;  // plan each call for its own sizes, also where a plan for all would do
};
// The tables of this thread if it has its own (a simulated rank is a thread), else those of the
// process.
extern Tables* shared_tables;
extern thread_local Tables* own_tables;
inline Tables* tables() { return own_tables != nullptr ? own_tables : shared_tables; }

// func(*arguments) on global tensors. A new reference.
PyObject* call(PyObject* func, const Arguments& arguments);

// The value of a property of torch.Tensor for the shard of a global tensor. A new reference.
PyObject* of_shard(PyObject* descriptor, PyObject* tensor);

// Whether torch would call the hook for a global tensor: __torch_function__ is not disabled in this
// thread, and no torch function mode is active, which would be asked first.
bool hook_is_on();

// (callable): `callable` is called once, before the first global tensor of this process is made.
PyObject* on_first_tensor(PyObject*, PyObject* callable);

// Whether autograd, in reverse or forward mode, would record an op on `tensors`. On failure it
// returns true with a Python error set.
bool asks_for_gradients(c10::ArrayRef<PyObject*> tensors);

// Makes `local`, a plain tensor that nobody else holds, a global tensor with `spec`: changes its
// type in place and sets `_spec`. False with a Python error set.
bool attach(PyObject* local, PyObject* spec);

}  // namespace consistent::dispatch
