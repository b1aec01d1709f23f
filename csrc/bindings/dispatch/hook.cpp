#include "hook.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/GradMode.h>
#include <c10/core/InferenceMode.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/object_ptr.h>

#include <utility>
#include <vector>

#include "aside.h"
#include "gradients/leaf.h"
#include "lookup/functions.h"
#include "lookup/key.h"
#include "lookup/plans.h"
#include "lookup/sizes.h"
#include "lookup/spec.h"
#include "plain_operands.h"

namespace consistent::dispatch {

Python python;
PyTypeObject* getter_type = nullptr;
Tables* shared_tables = nullptr;
thread_local Tables* own_tables = nullptr;

namespace {

using at::impl::PythonTorchFunctionTLS;
using at::impl::TorchFunctionDisabledState;

// Switches the hook off in this thread for the lifetime of the object, so that torch treats global
// tensors as their shards. ALL_DISABLED stays: it disables more than SUBCLASSES_DISABLED.
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

// Takes over a reference to an Entry or Function and drops it at the end of the scope. While the
// entry is in use, Python code may run and clear the tables.
template <typename T>
class Held {
 public:
  explicit Held(T* entry) : entry_(entry) {}
  T* get() const { return entry_; }
  ~Held() {
    if (entry_ != nullptr) entry_->drop();
  }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;

 private:
  T* entry_;
};

bool is_exactly(PyObject* x, PyObject* type) {
  return reinterpret_cast<PyObject*>(Py_TYPE(x)) == type;
}

// Makes the plain `tensor` a global tensor with the spec of output `position` of the plan.
bool retype_one(PyObject* tensor, const Entry& entry, size_t position) {
  if (position >= entry.outs.size()) {
    PyErr_Format(PyExc_IndexError, "%R returned more tensors than planned for",
                 entry.function.get());
    return false;
  }
  const Out& out = entry.outs[position];
  if (THPVariable_Unpack(tensor).scalar_type() == out.dtype) {
    return attach(tensor, out.spec.get());
  }
  // The dtype differs from the plan's if a mode such as autocast chose it when the op ran.
  THPObjectPtr dtype(PyObject_GetAttrString(tensor, "dtype"));
  if (!dtype) return false;
  THPObjectPtr other(PyObject_CallMethod(out.spec.get(), "with_dtype", "O", dtype.get()));
  return other && attach(tensor, other.get());
}

// Calls give(tensor, position) for each plain tensor in `out`, in order, and back(tensor, position)
// for each tensor of a subclass, which is an operand that the op returned. Stops and returns false
// if a call returns false. Other objects in `out` (numbers, None) have no position.
template <typename Give, typename Back>
bool each_output(PyObject* out, size_t* position, const Give& give, const Back& back) {
  if (is_exactly(out, THPVariableClass)) return give(out, (*position)++);
  if (PyTuple_Check(out) || PyList_Check(out)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(out); ++i) {
      if (!each_output(PySequence_Fast_GET_ITEM(out, i), position, give, back)) return false;
    }
  } else if (THPVariable_Check(out)) {
    return back(out, (*position)++);
  }
  return true;
}

// Whether `operand`, which the op returned, may be the result: is_planned(spec) says whether its
// spec is that of the result. An op returns its operand if it has nothing to do on the shard. For
// example, expand of 1 row to n split rows returns its operand on a rank that has 1 row of them.
template <typename IsPlanned>
bool may_give_back(PyObject* operand, const IsPlanned& is_planned) {
  static PyObject* const name = PyUnicode_InternFromString("_spec");
  if (Py_TYPE(operand) != global_class()) return true;
  THPObjectPtr spec(PyObject_GetAttr(operand, name));
  const bool planned = spec && is_planned(spec.get());
  PyErr_Clear();
  return planned;
}

// The tensors of the call as a new list.
THPObjectPtr as_list(const Key& key) {
  const auto count = static_cast<Py_ssize_t>(key.tensors.size());
  THPObjectPtr list(PyList_New(count));
  for (Py_ssize_t i = 0; list && i < count; ++i) {
    PyList_SET_ITEM(list.get(), i, Py_NewRef(key.tensors[i]));
  }
  return list;
}

// Whether every tensor of the call is itself an argument, not inside a list or a dict.
bool all_on_top(const Key& key, const Arguments& given) {
  if (given.dict != nullptr && PyDict_GET_SIZE(given.dict) != 0) return false;
  return given.tensors_on_top() == key.tensors.size();
}

// Boxes operands (moves them to another layout) as the plan says, and runs torch's function on the
// shards.
PyObject* run_boxed(const Entry& entry, const Key& key, const Arguments& given) {
  static PyObject* const boxed = PyUnicode_InternFromString("boxed");
  THPObjectPtr tensors = as_list(key);
  if (!tensors) return nullptr;
  THPObjectPtr moved(PyObject_CallMethodOneArg(entry.plan.get(), boxed, tensors.get()));
  if (!moved) return nullptr;
  // Borrowed from the arguments and from `moved`.
  c10::SmallVector<PyObject*, 8> values(given.values, given.values + given.all());
  Py_ssize_t next = 0;
  for (PyObject*& value : values) {
    if (THPVariable_Check(value)) value = PyList_GET_ITEM(moved.get(), next++);
  }
  HookOff off;
  return PyObject_Vectorcall(entry.function.get(), values.data(), static_cast<size_t>(given.count),
                             given.names);
}

// Runs torch's function on the shards, after boxing if the plan says so. `sizes`, a tuple, replaces
// the arguments after the first one; if it is null, the arguments stay as they are.
PyObject* run_on_shards(const Entry& entry, PyObject* sizes, const Key& key,
                        const Arguments& given) {
  if (entry.way == Way::kBoxed) return run_boxed(entry, key, given);
  HookOff off;
  if (sizes == nullptr) return given.pass_to(entry.function.get());
  const Py_ssize_t count = PyTuple_GET_SIZE(sizes);
  c10::SmallVector<PyObject*, 8> values{given.values[0]};
  for (Py_ssize_t i = 0; i < count; ++i) values.push_back(PyTuple_GET_ITEM(sizes, i));
  return PyObject_Vectorcall(entry.function.get(), values.data(), values.size(), nullptr);
}

// Called before an op writes to `target`. Raises if `target` is a moved view. While there are moved
// views, it also reports the write to Python: moved views compare how often their source was
// written. False with a Python error set.
bool may_write(const Entry& entry, PyObject* target) {
  const int moved = is_moved(target);
  if (moved < 0) return false;
  if (moved == 0) {
    if (PyList_GET_SIZE(python.moved_views) == 0 || !THPVariable_Check(target)) return true;
    THPObjectPtr done(PyObject_CallOneArg(python.wrote, target));
    return done.get() != nullptr;
  }
  THPObjectPtr op(PyObject_GetAttrString(entry.plan.get(), "name"));
  THPObjectPtr error(op ? PyObject_CallOneArg(python.moved_view_error, op.get()) : nullptr);
  if (error) PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.get())), error.get());
  return false;
}

// The same for all tensors that an in-place op writes to. Its first operand may be a list, and a
// fused optimizer step writes to several lists, so the tensors of all lists are checked.
bool may_write_into(const Entry& entry, const Arguments& given) {
  if (given.all() == 0) return true;  // all arguments are in a dict: none is known to be the target
  PyObject* first = given.values[0];
  if (!PyList_Check(first) && !PyTuple_Check(first)) return may_write(entry, first);
  if (PyList_GET_SIZE(python.moved_views) == 0) return true;
  for (Py_ssize_t i = 0; i < given.all(); ++i) {
    PyObject* list = given.values[i];
    if (!PyList_Check(list) && !PyTuple_Check(list)) continue;
    for (Py_ssize_t j = 0; j < PySequence_Fast_GET_SIZE(list); ++j) {
      PyObject* item = PySequence_Fast_GET_ITEM(list, j);
      if (Py_TYPE(item) == global_class() && !may_write(entry, item)) return false;
    }
  }
  return true;
}

// Calls plan.run(args, kwargs, tensors), the slow path that can do everything.
PyObject* run_in_python(const Entry& entry, const Key& key, const Arguments& given) {
  static PyObject* const run = PyUnicode_InternFromString("run");
  THPObjectPtr args, kwargs, tensors = as_list(key);
  if (!tensors || !given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  return PyObject_CallMethodObjArgs(entry.plan.get(), run, args.get(), kwargs.get(), tensors.get(),
                                    nullptr);
}

// Runs a plan that is one torch call on the shards (Way::kFast, or kBoxed after boxing), for one
// size.
PyObject* run_fast(const Entry& entry, const Key& key, const Arguments& given) {
  if (entry.inplace && !may_write_into(entry, given)) return nullptr;
  // Owned and counted by hand, as in attach().
  PyObject* out = run_on_shards(entry, entry.sizes.get(), key, given);
  if (out == nullptr) return nullptr;
  if (entry.adopts && returns_plain_operand(out, key)) {
    Py_DECREF(out);  // its memory is free before the op runs again
    return run_in_python(entry, key, given);
  }
  if (entry.inplace && !is_exactly(out, THPVariableClass)) return out;
  size_t position = 0;
  bool is_other = false;  // the op returned an operand whose spec is not the planned one
  const bool done = each_output(
      out, &position, [&](PyObject* tensor, size_t at) { return retype_one(tensor, entry, at); },
      [&](PyObject* operand, size_t at) {
        is_other = !may_give_back(operand, [&](PyObject* spec) {
          // A dtype other than the planned one was chosen by autocast: the spec differs then too.
          return at >= entry.outs.size() || spec == entry.outs[at].spec.get() ||
                 THPVariable_Unpack(operand).scalar_type() != entry.outs[at].dtype;
        });
        return !is_other;
      });
  if (done) return out;
  Py_DECREF(out);  // as above
  return is_other ? run_in_python(entry, key, given) : nullptr;
}

// The specs of outputs.
struct Specs {
  std::vector<THPObjectPtr> found;
  bool complete = false;  // every output has one
};

// The same for a plan that serves all sizes: the specs of the outputs are computed from the sizes
// of the results, and are stored in `specs`.
PyObject* run_fast_any_size(const Entry& entry, PyObject* local_sizes, const Sizes* whole,
                            const Key& key, const Arguments& given, Specs* specs) {
  if (entry.inplace && !may_write_into(entry, given)) return nullptr;
  THPObjectPtr out(run_on_shards(entry, local_sizes, key, given));
  if (!out || entry.inplace) return out.release();
  if (entry.adopts && returns_plain_operand(out.get(), key)) {
    out = nullptr;  // as in run_fast
    return run_in_python(entry, key, given);
  }
  const auto spec_at = [&](PyObject* tensor, size_t at) {
    const Out& planned = entry.outs[std::min(at, entry.outs.size() - 1)];
    return THPObjectPtr(spec_of_output(tensor, planned, key, whole));
  };
  size_t position = 0;
  bool is_other = false;  // as in run_fast
  const bool done = each_output(
      out.get(), &position,
      [&](PyObject* tensor, size_t at) {
        THPObjectPtr spec = spec_at(tensor, at);
        if (!spec || !attach(tensor, spec.get())) return false;
        specs->found.push_back(std::move(spec));
        return true;
      },
      [&](PyObject* operand, size_t at) {
        is_other = !may_give_back(operand, [&](PyObject* spec) {
          return spec_at(operand, at).get() == spec;  // specs are interned
        });
        return !is_other;
      });
  specs->complete = done && specs->found.size() == position;
  if (done) return out.release();
  out = nullptr;
  return is_other ? run_in_python(entry, key, given) : nullptr;
}

// Makes a plan in Python for a call whose key was not found. With `for_any_size`, the plan serves
// all sizes if such a plan is possible. A new reference; null with a Python error set.
Entry* plan(const Function& function, const Arguments& given, bool by_facts, bool for_any_size) {
  THPObjectPtr args, kwargs;
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  THPObjectPtr made(PyObject_CallFunctionObjArgs(
      python.make_plan, function.resolved.get(), args.get(), kwargs.get(),
      by_facts ? Py_True : Py_False, for_any_size ? Py_True : Py_False, nullptr));
  return made ? Entry::of(made.get()) : nullptr;
}

// Whether a key with this hash was met before. The array is a direct-mapped cache, so an older key
// may have been overwritten; then it returns false.
bool met_before(uint64_t hash) {
  constexpr size_t kMet = 4096;
  static uint64_t met[kMet] = {};
  uint64_t& last = met[hash % kMet];
  const bool again = last == hash;
  last = hash;
  return again;
}

// A call in progress: its function, arguments and key. Nothing is owned: the caller of the hook
// holds the arguments, and call_with() the function's entry.
struct Call {
  PyObject* func;
  const Function& function;
  const Arguments& given;
  Key& key;
  bool found_exactly = true;  // the next call with this exact key finds the plan by that key
  bool facts = false;         // the key includes facts

  // The plan of the call, a new reference.
  Entry* find();
  Entry* find_by_facts(Entry* by, Key& general);
  Entry* find_any_size(const Key& general, bool* failed);
  Entry* make(Key& general, bool by_facts);
  PyObject* run(const Entry& entry);
  PyObject* run_beside_plain(const Entry& entry);
  PyObject* run_this_size();
  PyObject* run_copy(const Entry& entry);
  PyObject* run_any_size(const Entry& entry, PyObject* local_sizes, const Sizes* whole);
  void remember(const Entry& entry, const Specs& specs, PyObject* local_sizes);
};

Entry* Call::find() {
  bool failed = false;
  Entry* found = tables()->exact.find(key, &failed);
  if (failed) return nullptr;
  if (found != nullptr && found->way != Way::kFacts) {
    found->hold();
    return found;
  }
  const bool known_facts = found != nullptr;
  if (known_facts) found->hold();
  Key general;
  if (!general.of_any_size(func, function, given, key)) {
    if (known_facts) found->drop();
    return nullptr;
  }
  if (!known_facts) {
    found = find_any_size(general, &failed);
    if (failed) return nullptr;
    if (found == nullptr) found = make(general, false);
    if (found == nullptr || found->way != Way::kFacts) return found;
    if (met_before(key.hash) && key.lasting) tables()->exact.insert(key, found);
  }
  return find_by_facts(found, general);
}

Entry* Call::find_any_size(const Key& general, bool* failed) {
  Entry* found = tables()->any_size.find(general, failed);
  if (*failed || found == nullptr) return nullptr;
  found->hold();
  found_exactly = false;
  return found;
}

// Finds the plan by keys that include facts: the entry `by` says which. Takes over the reference to
// `by`.
Entry* Call::find_by_facts(Entry* by, Key& general) {
  const bool added = key.add_facts(given, by->by_value, by->by_grad) &&
                     general.add_facts(given, by->by_value, by->by_grad);
  by->drop();
  if (!added) return nullptr;
  facts = true;
  bool failed = false;
  Entry* found = tables()->exact.find(key, &failed);
  if (failed) return nullptr;
  if (found != nullptr) {
    found->hold();
    found_exactly = true;
    return found;
  }
  found = find_any_size(general, &failed);
  return failed || found != nullptr ? found : make(general, true);
}

Entry* Call::make(Key& general, bool by_facts) {
  // Planning runs Python code, which may release what the keys borrow (a spec, say), and another
  // object could then get the same address.
  key.hold();
  general.hold();
  Entry* entry = plan(function, given, by_facts, !tables()->plan_each);
  if (entry == nullptr) return nullptr;
  found_exactly = !entry->any_size || tables()->plan_each;
  const Key& mine = found_exactly ? key : general;
  PlanTable& table = found_exactly ? tables()->exact : tables()->any_size;
  if (entry->kept && mine.lasting) table.insert(mine, entry);
  return entry;
}

PyObject* Call::run(const Entry& entry) {
  if (entry.way == Way::kAnswer) return Py_NewRef(entry.constant.get());
  if (entry.way == Way::kCall) return given.pass_to(entry.function.get());
  const bool watched = PyList_GET_SIZE(python.op_tracers) != 0;
  const bool in_one_call =
      entry.way == Way::kFast || (entry.way == Way::kBoxed && all_on_top(key, given));
  const bool fast = in_one_call && !watched && !key.moved;
  if (fast && entry.adopts) return run_beside_plain(entry);
  const bool sized = entry.any_size && function.sizing != Sizing::kNone && !entry.outs.empty() &&
                     !entry.outs[0].sources.empty();
  if (!sized) {
    if (!fast && entry.is_copy && entry.sizes) return run_copy(entry);
    if (!fast) return run_in_python(entry, key, given);
    return entry.any_size ? run_any_size(entry, nullptr, nullptr) : run_fast(entry, key, given);
  }
  SizeArguments sizes;
  if (!fast || !read_sizes(function.sizing, entry.outs[0], key, given, &sizes)) {
    return run_this_size();
  }
  THPObjectPtr local_sizes(local_arguments(sizes));
  return local_sizes ? run_any_size(entry, local_sizes.get(), &sizes.whole) : nullptr;
}

// Runs a plan that is one torch call on shards and on plain tensors, which count as broadcast.
PyObject* Call::run_beside_plain(const Entry& entry) {
  const int may = may_stay_plain(key);
  if (may < 0) return nullptr;
  if (may == 0) return run_in_python(entry, key, given);
  return entry.any_size ? run_any_size(entry, nullptr, nullptr) : run_fast(entry, key, given);
}

// Makes a plan for exactly the sizes of this call, and runs it.
PyObject* Call::run_this_size() {
  key.hold();
  Entry* entry = plan(function, given, facts, false);
  if (entry == nullptr) return nullptr;
  const Held<Entry> held(entry);
  if (entry->kept && key.lasting) tables()->exact.insert(key, entry);
  found_exactly = true;
  return run(*entry);
}

// Runs, in Python, an entry that remember() has copied from a plan for all sizes. The copy's sizes
// were computed here and its Python plan has none, so Python needs a plan made for these sizes.
PyObject* Call::run_copy(const Entry& entry) {
  if (entry.exact == nullptr) {
    Entry* made = plan(function, given, facts, false);
    if (made == nullptr) return nullptr;
    if (entry.exact != nullptr) entry.exact->drop();  // planning may have set it meanwhile
    entry.exact = made;
  }
  entry.exact->hold();
  const Held<Entry> held(entry.exact);
  return run(*held.get());
}

PyObject* Call::run_any_size(const Entry& entry, PyObject* local_sizes, const Sizes* whole) {
  Specs specs;
  PyObject* out = run_fast_any_size(entry, local_sizes, whole, key, given, &specs);
  // An op that returned its operand (x.contiguous()) may return a new tensor the next time, and for
  // that tensor no spec was computed here.
  const bool all_new = !specs.found.empty() && specs.complete;
  if (out != nullptr && !found_exactly && entry.kept && entry.known_shapes && all_new) {
    remember(entry, specs, local_sizes);
  }
  return out;
}

// Inserts a copy of `entry` for the sizes of this call, if the call is met a second time. The copy
// is found by the exact key alone, and needs no computation of specs.
void Call::remember(const Entry& entry, const Specs& specs, PyObject* local_sizes) {
  if (!met_before(key.hash) || !key.lasting) return;
  const Held<Entry> made(entry.with(specs.found, local_sizes));
  tables()->exact.insert(key, made.get());
}

PyObject* call_with(PyObject* func, const Arguments& given, bool fresh);

// Runs the call after Python has renewed those moved views among the arguments whose sources were
// written since the view was moved.
PyObject* call_freshened(PyObject* func, const Arguments& given) {
  THPObjectPtr made;
  {
    THPObjectPtr args, kwargs;
    if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
    made = PyObject_CallFunctionObjArgs(python.freshened, args.get(), kwargs.get(), nullptr);
  }
  if (!made) return nullptr;
  if (made.get() == Py_None) return call_with(func, given, true);
  PyObject *args = PyTuple_GET_ITEM(made.get(), 0), *kwargs = PyTuple_GET_ITEM(made.get(), 1);
  return call_with(func, Arguments(args, kwargs), true);  // both borrowed from `made`
}

PyObject* call_with(PyObject* func, const Arguments& given, bool fresh) {
  // A property's getter is a new object in each call, so its address must not be remembered.
  const bool lasting = Py_TYPE(func) != getter_type;
  Function* function = function_of(func, lasting);
  if (function == nullptr) return nullptr;
  const Held<Function> held(function);
  const bool may_be_moved = PyList_GET_SIZE(python.moved_views) != 0 && !fresh;
  if (function->call && !tables()->plan_each) {
    return may_be_moved ? call_freshened(func, given) : given.pass_to(function->call.get());
  }
  Key key(may_be_moved || fresh);
  if (!key.of_call(func, given)) return nullptr;
  if (key.moved && !fresh) return call_freshened(func, given);
  Call call{func, *function, given, key};
  Entry* entry = call.find();
  if (entry == nullptr) return nullptr;
  const Held<Entry> held_entry(entry);
  return call.run(*entry);
}

// Called before the first global tensor is made. Owned, and not a THPObjectPtr: the destructor of a
// global would run at exit, without the GIL.
PyObject* first = nullptr;

bool call_first() {
  THPObjectPtr callable(std::exchange(first, nullptr));
  THPObjectPtr done(PyObject_CallNoArgs(callable.get()));
  // If it failed, it is called again at the next attempt: it must succeed before any tensor is
  // made.
  if (!done) first = callable.release();
  return done.get() != nullptr;
}

// Whether this call is an op of a backward pass that a user's dispatch mode calls again. Below
// autograd, tensors stand for shards, even if torch kept the Python object of a global tensor.
bool below_autograd() {
  return c10::impl::tls_is_dispatch_key_excluded(c10::DispatchKey::AutogradFunctionality) &&
         torch::autograd::get_current_graph_task_id() != -1;
}

// Reports the Python error that an op raised to `count_lack`, and leaves the error set. If the
// error is a lack of memory, other ranks may not have met it.
void raised() {
  PyObject *type, *value, *trace;  // owned, until PyErr_Restore takes them over
  PyErr_Fetch(&type, &value, &trace);
  PyErr_NormalizeException(&type, &value, &trace);
  if (!THPObjectPtr(PyObject_CallOneArg(python.count_lack, value))) PyErr_Clear();
  PyErr_Restore(type, value, trace);
}

// Raises for a call that a tracer (`by`) would record.
void refuse_recorded(PyObject* func, const char* by) {
  THPObjectPtr name(PyObject_GetAttrString(func, "__name__"));
  if (!name) PyErr_Clear();
  PyErr_Format(
      PyExc_RuntimeError,
      "%S: it was given a global tensor while %s records ops, which would be those of this "
      "rank's shard. Use it eagerly, or record it on plain tensors: x.full() or "
      "x.to_local().",
      name ? name.get() : func, by);
}

}  // namespace

PyObject* on_first_tensor(PyObject*, PyObject* callable) {
  Py_XSETREF(first, Py_NewRef(callable));
  Py_RETURN_NONE;
}

bool attach(PyObject* local, PyObject* spec) {
  if (first != nullptr && !call_first()) return false;
  static PyObject* const spec_name = PyUnicode_InternFromString("_spec");
#if PY_VERSION_HEX < 0x030D0000
  // The same as assigning to __class__, without its check that the types are compatible:
  // torch.Tensor and its subclass have the same memory layout. The instance's dict is created
  // first, so that the object does not store its attributes inline, in an order that belongs to its
  // old type. `dict` is owned and counted by hand: the destructor of a THPObjectPtr is a call into
  // libtorch_python, and every output of every op comes here.
  PyObject* dict = PyObject_GenericGetDict(local, nullptr);
  if (dict == nullptr) return false;
  PyTypeObject* type = Py_TYPE(local);
  if (type != global_class()) {
    // An instance of a heap type owns a reference to its type.
    Py_INCREF(global_class());
    Py_SET_TYPE(local, global_class());
    Py_DECREF(type);
  }
  const int done = PyDict_SetItem(dict, spec_name, spec);
  Py_DECREF(dict);
  return done == 0 && watch_if_leaf(local);
#else
  static PyObject* const class_name = PyUnicode_InternFromString("__class__");
  return PyObject_GenericSetAttr(local, class_name, reinterpret_cast<PyObject*>(global_class())) ==
             0 &&
         PyObject_GenericSetAttr(local, spec_name, spec) == 0 && watch_if_leaf(local);
#endif
}

PyObject* of_shard(PyObject* descriptor, PyObject* tensor) {
  HookOff off;
  return Py_TYPE(descriptor)
      ->tp_descr_get(descriptor, tensor, reinterpret_cast<PyObject*>(Py_TYPE(tensor)));
}

bool hook_is_on() {
  return PythonTorchFunctionTLS::get_disabled_state() == TorchFunctionDisabledState::ENABLED &&
         !at::impl::torch_function_mode_enabled();
}

bool asks_for_gradients(c10::ArrayRef<PyObject*> tensors) {
  THPObjectPtr level(PyObject_GetAttrString(python.forward_ad, "_current_level"));
  const bool forward = level && PyLong_AsLong(level.get()) >= 0;
  if (forward || PyErr_Occurred()) return true;
  if (!at::GradMode::is_enabled() || c10::InferenceMode::is_enabled()) return false;
  for (PyObject* tensor : tensors) {
    if (THPVariable_Unpack(tensor).requires_grad()) return true;
  }
  return false;
}

PyObject* call(PyObject* func, const Arguments& given) {
  if (below_autograd()) {
    HookOff off;
    return given.pass_to(func);
  }
  const char* by = recorder();
  if (by != nullptr) {
    refuse_recorded(func, by);
    return nullptr;
  }
  PyObject* out = call_with(func, given, false);
  if (out == nullptr) raised();
  return out;
}

}  // namespace consistent::dispatch
