// The __torch_function__ hook of GlobalTensor.

#pragma once

#include <Python.h>

#include "key.h"

namespace consistent::dispatch {

// What the hot path calls when it is not enough; entered once, from Python.
struct Python {
  PyObject* make_plan = nullptr;         // (func, args, kwargs) -> Plan
  PyObject* execute = nullptr;           // (plan, args, kwargs) -> result
  PyObject* moved_view_error = nullptr;  // (name) -> exception
  PyObject* observers = nullptr;         // a list: while it is not empty, `execute` runs all plans
  PyObject* clear_plans = nullptr;       // ()
  PyObject* type_gradient = nullptr;     // (leaf, plain gradient) -> global gradient
  PyObject* ties = nullptr;       // a list: while it is not empty, operands may be moved views
  PyObject* freshened = nullptr;  // (args, kwargs) -> the same of fresh views, or None
};
extern Python python;

class PlanTable;
extern PlanTable* plans;  // where the hook looks plans up
constexpr size_t kMaxPlans = size_t{1} << 16;

// func(*arguments) on global tensors. A new reference.
PyObject* call(PyObject* func, const Arguments& arguments);

// What a property of torch.Tensor says of the shard itself. A new reference.
PyObject* of_shard(PyObject* descriptor, PyObject* tensor);

// The gradient of a global tensor as a global tensor, or None. A new reference.
PyObject* gradient(PyObject* leaf);

// Whether torch would hand calls to the hook: it is not off, and no mode comes first.
bool hook_is_on();

// Retypes `local`, a plain tensor that nobody else holds, as the shard of a tensor with `spec`.
bool attach(PyObject* local, PyObject* spec);

}  // namespace consistent::dispatch
