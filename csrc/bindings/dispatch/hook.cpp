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

 private:
  Entry* entry_;
};

bool is_exactly(PyObject* x, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(x)) == type;
}

// Gives the plain `tensor` the spec at `position` of the plan's outs.
bool retype_one(PyObject* tensor, const Entry& entry, size_t position) {
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

PyObject* run_on_shards(const Entry& entry, const Arguments& given) {
  HookOff off;
  if (entry.sizes == nullptr) return given.pass_to(entry.run);
  const Py_ssize_t count = PyTuple_GET_SIZE(entry.sizes);
  c10::SmallVector<PyObject*, 8> values{given.values[0]};
  for (Py_ssize_t i = 0; i < count; ++i) values.push_back(PyTuple_GET_ITEM(entry.sizes, i));
  return PyObject_Vectorcall(entry.run, values.data(), values.size(), nullptr);
}

bool check_not_moved(const Entry& entry, PyObject* target) {
  const int moved = is_moved(target);
  if (moved <= 0) return moved == 0;
  PyObject* op = PyObject_GetAttrString(entry.plan, "name");
  PyObject* error = op ? PyObject_CallOneArg(python.moved_view_error, op) : nullptr;
  if (error != nullptr) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error)), error);
  Py_XDECREF(error);
  Py_XDECREF(op);
  return false;
}

// A plan that is one torch call on the shards as they lie.
PyObject* run_fast(const Entry& entry, const Arguments& given) {
  if (entry.inplace && !check_not_moved(entry, given.values[0])) return nullptr;
  PyObject* out = run_on_shards(entry, given);
  if (out == nullptr) return nullptr;
  size_t position = 0;
  if (is_exactly(out, THPVariableClass) ? retype_one(out, entry, 0)
                                        : entry.inplace || retype(out, entry, &position)) {
    return out;
  }
  Py_DECREF(out);
  return nullptr;
}

// Keeps `entry` in the table; false with a Python error set.
bool keep(const Key& key, Entry* entry) {
  if (plans->size() >= kMaxPlans) {
    PyObject* done = PyObject_CallNoArgs(python.clear_plans);
    if (done == nullptr) return false;
    Py_DECREF(done);
  }
  plans->insert(key, entry);
  return true;
}

// Plans a call met for the first time. A new reference.
Entry* plan(Key& key, PyObject* func, const Arguments& given) {
  key.hold();
  PyObject *args = nullptr, *kwargs = nullptr;
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  PyObject* made = PyObject_CallFunctionObjArgs(python.make_plan, func, args, kwargs, nullptr);
  Py_DECREF(args);
  Py_DECREF(kwargs);
  if (made == nullptr) return nullptr;
  Entry* entry = Entry::of(made);
  Py_DECREF(made);
  if (entry == nullptr || !entry->kept || keep(key, entry)) return entry;
  entry->drop();
  return nullptr;
}

PyObject* run_in_python(const Entry& entry, const Arguments& given) {
  PyObject *args = nullptr, *kwargs = nullptr;
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  PyObject* out = PyObject_CallFunctionObjArgs(python.execute, entry.plan, args, kwargs, nullptr);
  Py_DECREF(args);
  Py_DECREF(kwargs);
  return out;
}

}  // namespace

bool attach(PyObject* local, PyObject* spec) {
  static PyObject* const spec_name = PyUnicode_InternFromString("_spec");
#if PY_VERSION_HEX < 0x030D0000
  // What assigning to __class__ does once the types are known to fit: torch.Tensor and its subclass
  // have the same layout. With its dict in place, the object keeps no values by its type's order.
  PyObject* dict = PyObject_GenericGetDict(local, nullptr);
  if (dict == nullptr) return false;
  PyTypeObject* type = Py_TYPE(local);
  if (type != global_class()) {
    Py_INCREF(global_class());
    Py_SET_TYPE(local, global_class());
    Py_DECREF(type);
  }
  const int done = PyDict_SetItem(dict, spec_name, spec);
  Py_DECREF(dict);
  return done == 0;
#else
  static PyObject* const class_name = PyUnicode_InternFromString("__class__");
  return PyObject_GenericSetAttr(local, class_name, reinterpret_cast<PyObject*>(global_class())) ==
             0 &&
         PyObject_GenericSetAttr(local, spec_name, spec) == 0;
#endif
}

PyObject* of_shard(PyObject* descriptor, PyObject* tensor) {
  HookOff off;
  return Py_TYPE(descriptor)
      ->tp_descr_get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
}

PyObject* gradient(PyObject* leaf) {
  const at::Tensor& found = THPVariable_Unpack(leaf).grad();
  if (!found.defined()) Py_RETURN_NONE;
  PyObject* grad = THPVariable_Wrap(found);
  if (grad == nullptr || Py_TYPE(grad) == global_class()) return grad;
  PyObject* typed = PyObject_CallFunctionObjArgs(python.type_gradient, leaf, grad, nullptr);
  Py_DECREF(grad);
  return typed;
}

bool hook_is_on() {
  return PythonTorchFunctionTLS::get_disabled_state() == TorchFunctionDisabledState::ENABLED &&
         !at::impl::torch_function_mode_enabled();
}

namespace {

PyObject* call_with(PyObject* func, const Arguments& given, bool fresh);

// The call with moved views taken again where their sources were written meanwhile.
PyObject* call_freshened(PyObject* func, const Arguments& given) {
  PyObject *args = nullptr, *kwargs = nullptr;
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  PyObject* made = PyObject_CallFunctionObjArgs(python.freshened, args, kwargs, nullptr);
  Py_DECREF(args);
  Py_DECREF(kwargs);
  if (made == nullptr) return nullptr;
  PyObject* out =
      made == Py_None
          ? call_with(func, given, true)
          : call_with(func, Arguments(PyTuple_GET_ITEM(made, 0), PyTuple_GET_ITEM(made, 1)), true);
  Py_DECREF(made);
  return out;
}

PyObject* call_with(PyObject* func, const Arguments& given, bool fresh) {
  Key key(PyList_GET_SIZE(python.ties) != 0);
  if (!key.of_call(func, given)) return nullptr;
  if (key.tied && !fresh) return call_freshened(func, given);
  bool failed = false;
  Entry* found = plans->find(key, &failed);
  if (failed) return nullptr;
  if (found != nullptr) {
    found->hold();
  } else {
    found = plan(key, func, given);
    if (found == nullptr) return nullptr;
  }
  const Held entry(found);
  if (found->constant != nullptr) return Py_NewRef(found->constant);
  if (found->as_called) return given.pass_to(found->run);
  const bool watched = PyList_GET_SIZE(python.observers) != 0;
  const bool fast = found->fast && !watched && !key.tied;
  return fast ? run_fast(*found, given) : run_in_python(*found, given);
}

}  // namespace

PyObject* call(PyObject* func, const Arguments& given) { return call_with(func, given, false); }

}  // namespace consistent::dispatch
