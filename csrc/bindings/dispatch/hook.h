// The __torch_function__ hook of GlobalTensor.

#pragma once

#include <Python.h>

#include "lookup/key.h"
#include "lookup/plans.h"

namespace consistent::dispatch {

// The Python functions that the hot path calls for what it cannot do itself; set once, from Python.
struct Python {
  PyObject* resolve = nullptr;    // (func) -> TorchFunction
  PyObject* make_plan = nullptr;  // (TorchFunction, args, kwargs, by_facts, for_any_size) -> Plan
  PyObject* moved_view_error = nullptr;  // (name) -> exception
  PyObject* op_tracers = nullptr;        // a list: while it is not empty, Python runs all plans
  PyObject* moved_views = nullptr;  // a list: while it is not empty, operands may be moved views
  PyObject* freshened = nullptr;    // (args, kwargs) -> the same of fresh views, or None
  PyObject* wrote = nullptr;        // (tensor): called before a write while there are moved views
  PyObject* forward_ad = nullptr;   // torch.autograd.forward_ad
  PyObject* check_mode = nullptr;   // the module, whose `enabled` says whether ranks compare notes
  PyObject* count_lack = nullptr;   // (error): called with what an op raised
};
extern Python python;

// The type of the getters of properties, such as torch.Tensor.shape.__get__; set when the module is
// loaded, because the headers of Python 3.13 do not name it.
extern PyTypeObject* getter_type;

// The tables in which the hook looks plans up: one by exact keys, one by general keys.
struct Tables {
  explicit Tables(size_t most) : exact(most), any_size(most) {}
  PlanTable exact, any_size;
  bool plan_each = false;  // plan every call, for its own sizes
};
// Those of this thread, as each simulated rank is one; else those of the process.
extern Tables* shared_tables;
extern thread_local Tables* own_tables;
inline Tables* tables() { return own_tables != nullptr ? own_tables : shared_tables; }

// func(*arguments) on global tensors. A new reference.
PyObject* call(PyObject* func, const Arguments& arguments);

// The value of a property of torch.Tensor for the shard itself. A new reference.
PyObject* of_shard(PyObject* descriptor, PyObject* tensor);

// Whether torch would pass calls to the hook: it is not switched off, and no mode comes first.
bool hook_is_on();

// (callable): it is called once, before the first global tensor of this process is made.
PyObject* on_first_tensor(PyObject*, PyObject* callable);

// Whether autograd, in reverse or forward mode, records an op on `tensors`. A Python error may be
// set.
bool asks_for_gradients(c10::ArrayRef<PyObject*> tensors);

// Retypes `local`, a plain tensor that nobody else holds, as the shard of a tensor with `spec`.
bool attach(PyObject* local, PyObject* spec);

}  // namespace consistent::dispatch
