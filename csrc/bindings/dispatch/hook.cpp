#include "hook.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/autograd/python_variable.h>

#include "key.h"
#include "plans.h"

namespace consistent::dispatch {

Python python;
PlanTable* plans = nullptr;

namespace {

using at::impl::PythonTorchFunctionTLS;
using at::impl::TorchFunctionDisabledState;

// torch.no_grad's kin for hooks: inside, global tensors are their shards. In this thread only.
class HookOff {
 public:
  HookOff() : before_(PythonTorchFunctionTLS::get_disabled_state()) {
    if (before_ != TorchFunctionDisabledState::ALL_DISABLED) {
      PythonTorchFunctionTLS::set_disabled_state(TorchFunctionDisabledState::SUBCLASSES_DISABLED);
    }
  }
  ~HookOff() { PythonTorchFunctionTLS::set_disabled_state(before_); }
  HookOff(const HookOff&) = delete;
  HookOff& operator=(const HookOff&) = delete;

 private:
  TorchFunctionDisabledState before_;
};

// Keeps an entry while its plan runs: the table may be cleared meanwhile.
class Held {
 public:
  explicit Held(Entry* entry) : entry_(entry) {}
  ~Held() {
    if (entry_ != nullptr) entry_->drop();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
  Entry* operator->() const { return entry_; }

 private:
  Entry* entry_;
};

bool is_exactly(PyObject* x, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(x)) == type;
}

// Gives `tensor` the spec at `position` of the plan's outs, if it is a plain one.
bool retype_one(PyObject* tensor, const Entry& entry, size_t position) {
  if (!is_exactly(tensor, THPVariableClass)) return true;
  if (position >= entry.outs.size()) {
    PyErr_Format(PyExc_IndexError, "%R returned more tensors than planned for", entry.run);
    return false;
  }
  PyObject* spec = entry.outs[position];
  if (THPVariable_Unpack(tensor).scalar_type() == entry.dtypes[position]) {
    return attach(tensor, spec);
  }
  // Autocast and its kin decide about dtypes when the op runs.
  PyObject* dtype = PyObject_GetAttrString(tensor, "dtype");
  if (dtype == nullptr) return false;
  PyObject* other = PyObject_CallMethod(spec, "with_dtype", "O", dtype);
  Py_DECREF(dtype);
  const bool done = other != nullptr && attach(tensor, other);
  Py_XDECREF(other);
  return done;
}

// The same for all tensors in `out`, in order.
bool retype(PyObject* out, const Entry& entry, size_t* position) {
  if (is_exactly(out, THPVariableClass)) return retype_one(out, entry, (*position)++);
  if (PyTuple_Check(out) || PyList_Check(out)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i) {
      if (!retype(PySequence_Fast_GET_ITEM(out, i), entry, position)) return false;
    }
  } else if (THPVariable_Check(out)) {
    ++*position;
  }
  return true;
}

PyObject* run_on_shards(const Entry& entry, PyObject* args, PyObject* kwargs) {
  HookOff off;
  if (entry.sizes == nullptr) return PyObject_Call(entry.run, args, kwargs);
  const Py_ssize_t count = PyTuple_GET_SIZE(entry.sizes);
  c10::SmallVector<PyObject*, 8> given{PyTuple_GET_ITEM(args, 0)};
  for (Py_ssize_t i = 0; i < count; ++i) given.push_back(PyTuple_GET_ITEM(entry.sizes, i));
  return PyObject_Vectorcall(entry.run, given.data(), given.size(), nullptr);
}

bool check_not_moved(const Entry& entry, PyObject* args) {
  static PyObject* const name = PyUnicode_InternFromString("_moved_view");
  PyObject* moved = PyObject_GetAttr(PyTuple_GET_ITEM(args, 0), name);
  if (moved == nullptr) return false;
  const bool is = moved == Py_True;
  Py_DECREF(moved);
  if (!is) return true;
  PyObject* op = PyObject_GetAttrString(entry.plan, "name");
  PyObject* error = op ? PyObject_CallOneArg(python.moved_view_error, op) : nullptr;
  if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_XDECREF(error);
  Py_XDECREF(op);
  return false;
}

// A plan that is one torch call on the shards as they lie.
PyObject* run_fast(const Entry& entry, PyObject* args, PyObject* kwargs) {
  if (entry.inplace && !check_not_moved(entry, args)) return nullptr;
  PyObject* out = run_on_shards(entry, args, kwargs);
  if (out == nullptr) return nullptr;
  size_t position = 0;
  if (is_exactly(out, THPVariableClass) ? retype_one(out, entry, 0)
                                        : entry.inplace || retype(out, entry, &position)) {
    return out;
  }
  Py_DECREF(out);
  return nullptr;
}

// Plans a call met for the first time. A new reference.
Entry* plan(Key& key, PyObject* func, PyObject* args, PyObject* kwargs) {
  key.hold();
  PyObject* made = PyObject_CallFunctionObjArgs(python.make_plan, func, args, kwargs, nullptr);
  if (made == nullptr) return nullptr;
  Entry* entry = Entry::of(made);
  Py_DECREF(made);
  if (entry == nullptr || !entry->kept) return entry;
  if (plans->size() >= kMaxPlans) {
    PyObject* done = PyObject_CallNoArgs(python.clear_plans);
    if (done == nullptr) {
      entry->drop();
      return nullptr;
    }
    Py_DECREF(done);
  }
  plans->insert(key, entry);
  return entry;
}

}  // namespace

bool attach(PyObject* local, PyObject* spec) {
  static PyObject* const class_name = PyUnicode_InternFromString("__class__");
  static PyObject* const spec_name = PyUnicode_InternFromString("_spec");
  return PyObject_GenericSetAttr(local, class_name, reinterpret_cast<PyObject*>(global_class())) ==
             0 &&
         PyObject_GenericSetAttr(local, spec_name, spec) == 0;
}

PyObject* call(PyObject* func, PyObject* args, PyObject* kwargs) {
  Key key;
  if (!key.of_call(func, args, kwargs)) return nullptr;
  bool failed = false;
  Entry* found = plans->find(key, &failed);
  if (failed) return nullptr;
  if (found != nullptr) {
    found->hold();
  } else {
    PyObject* named = kwargs != nullptr ? kwargs : PyDict_New();
    found = named != nullptr ? plan(key, func, args, named) : nullptr;
    if (kwargs == nullptr) Py_XDECREF(named);
    if (found == nullptr) return nullptr;
  }
  const Held entry(found);
  if (found->fast && PyList_GET_SIZE(python.observers) == 0) return run_fast(*found, args, kwargs);
  PyObject* named = kwargs != nullptr ? kwargs : PyDict_New();
  if (named == nullptr) return nullptr;
  PyObject* out = PyObject_CallFunctionObjArgs(python.execute, found->plan, args, named, nullptr);
  if (kwargs == nullptr) Py_DECREF(named);
  return out;
}

}  // namespace consistent::dispatch
