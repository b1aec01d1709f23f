// Python bindings of the dispatch hook: the module consistent.dispatch._C.

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "aside.h"
#include "function.h"
#include "gradients/leaf.h"
#include "hook.h"
#include "lookup/functions.h"
#include "lookup/key.h"
#include "lookup/plans.h"
#include "lookup/spec.h"
#include "method.h"
#include "redirect/holds.h"
#include "redirect/numbers.h"
#include "redirect/redirect.h"
#include "redirect/redirect_class.h"
#include "redirect/redirect_property.h"

namespace consistent::dispatch {
namespace {

struct PyPlanTable {
  PyObject_HEAD Tables* tables;
};

Tables* tables_of(PyObject* self) { return reinterpret_cast<PyPlanTable*>(self)->tables; }

PyObject* table_new(PyTypeObject* type, PyObject* args, PyObject*) {
  int plan_each = 0;
  Py_ssize_t most = 4096;
  if (!PyArg_ParseTuple(args, "|pn", &plan_each, &most)) return nullptr;
  if (most < 1) {
    PyErr_Format(PyExc_ValueError, "PlanTable: a table of %zd plans keeps none; give 1 or more",
                 most);
    return nullptr;
  }
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  reinterpret_cast<PyPlanTable*>(self)->tables = new Tables(static_cast<size_t>(most));
  tables_of(self)->plan_each = plan_each != 0;
  return self;
}

void table_dealloc(PyObject* self) {
  delete tables_of(self);
  Py_TYPE(self)->tp_free(self);
}

PyObject* table_clear(PyObject* self, PyObject*) {
  tables_of(self)->exact.clear();
  tables_of(self)->any_size.clear();
  Py_RETURN_NONE;
}

PyObject* table_values(PyObject* self, PyObject*) {
  PyObject* list = PyList_New(0);
  for (const PlanTable* table : {&tables_of(self)->exact, &tables_of(self)->any_size}) {
    for (Entry* entry : table->entries()) {
      if (list != nullptr && PyList_Append(list, entry->plan.get()) != 0) Py_CLEAR(list);
    }
  }
  return list;
}

PyObject* table_counts(PyObject* self, void*) {
  return Py_BuildValue("(nn)", static_cast<Py_ssize_t>(tables_of(self)->exact.size()),
                       static_cast<Py_ssize_t>(tables_of(self)->any_size.size()));
}

Py_ssize_t table_length(PyObject* self) {
  return static_cast<Py_ssize_t>(tables_of(self)->exact.size() + tables_of(self)->any_size.size());
}

PyMethodDef table_methods[] = {
    {"clear", table_clear, METH_NOARGS, "Forget all plans."},
    {"values", table_values, METH_NOARGS, "The plans, in no order."},
    {nullptr, nullptr, 0, nullptr},
};

PyGetSetDef table_getters[] = {
    {"counts", table_counts, nullptr, "How many plans are for one size, how many for all.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PySequenceMethods table_sequence = {table_length};

PyTypeObject table_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* shared = nullptr;            // owned: the PyPlanTable of the process
thread_local PyObject* own = nullptr;  // owned: that of this thread, if it has one

// Returns the table that was in use before. Its reference passes to the caller.

PyObject* use(PyObject*, PyObject* given) {
  if (Py_TYPE(given) != &table_type) {
    PyErr_Format(PyExc_TypeError, "use: a PlanTable is needed, not %R", given);
    return nullptr;
  }
  Py_INCREF(given);
  if (shared == nullptr) {
    shared = given;
    shared_tables = tables_of(given);
    Py_RETURN_NONE;
  }
  PyObject* before = own != nullptr ? own : Py_NewRef(shared);
  if (given == shared) {
    Py_DECREF(given);
    own = nullptr;
    own_tables = nullptr;
  } else {
    own = given;
    own_tables = tables_of(given);
  }
  return before;
}

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *global_tensor = nullptr, *mirrored_tensor = nullptr, *spec = nullptr, *layout = nullptr;
  Python given;
  if (!PyArg_ParseTuple(args, "OOOOOOOO!O!OOOOO", &global_tensor, &mirrored_tensor, &spec, &layout,
                        &given.resolve, &given.make_plan, &given.moved_view_error, &PyList_Type,
                        &given.op_tracers, &PyList_Type, &given.moved_views, &given.freshened,
                        &given.wrote, &given.forward_ad, &given.check_mode, &given.count_lack)) {
    return nullptr;
  }
  if (!set_spec_classes(spec, layout)) return nullptr;
  for (PyObject* part :
       {given.resolve, given.make_plan, given.moved_view_error, given.op_tracers, given.moved_views,
        given.freshened, given.wrote, given.forward_ad, given.check_mode, given.count_lack}) {
    Py_INCREF(part);
  }
  set_classes(global_tensor, mirrored_tensor);
  python = given;
  Py_RETURN_NONE;
}

// (func, args, kwargs, general) -> the key as bytes and objects, which are equal for equal calls.
// For tests.
PyObject* key_of(PyObject*, PyObject* given) {
  HANDLE_TH_ERRORS
  PyObject *func = nullptr, *args = nullptr, *kwargs = nullptr;
  int general = 0;
  if (!PyArg_ParseTuple(given, "OO!O!p", &func, &PyTuple_Type, &args, &PyDict_Type, &kwargs,
                        &general)) {
    return nullptr;
  }
  const Arguments arguments(args, kwargs);
  Key exact, any_size;
  if (!exact.of_call(func, arguments)) return nullptr;
  if (general != 0) {
    Function* function = function_of(func, true);
    if (function == nullptr) return nullptr;
    const bool made = any_size.of_any_size(func, *function, arguments, exact);
    function->drop();
    if (!made) return nullptr;
  }
  const Key& key = general != 0 ? any_size : exact;
  PyObject* objects = PyTuple_New(static_cast<Py_ssize_t>(key.objects.size()));
  for (size_t i = 0; objects != nullptr && i < key.objects.size(); ++i) {
    PyTuple_SET_ITEM(objects, static_cast<Py_ssize_t>(i), Py_NewRef(key.objects[i]));
  }
  const auto bytes = static_cast<Py_ssize_t>(key.atoms.size() * sizeof(Atom));
  return Py_BuildValue("(y#N)", reinterpret_cast<const char*>(key.atoms.data()), bytes, objects);
  END_HANDLE_TH_ERRORS
}

PyObject* forget_functions(PyObject*, PyObject*) {
  clear_functions();
  Py_RETURN_NONE;
}

PyObject* torch_function(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  if (count < 3 || count > 4 || !PyTuple_Check(args[2]) ||
      (count == 4 && args[3] != Py_None && !PyDict_Check(args[3]))) {
    PyErr_SetString(PyExc_TypeError, "torch_function: func, types, args and kwargs are needed");
    return nullptr;
  }
  const bool named = count == 4 && args[3] != Py_None;
  return call(args[0], Arguments(args[2], named ? args[3] : nullptr));
  END_HANDLE_TH_ERRORS
}

// Replaces torch.overrides.handle_torch_function, by which torch's Python functions call hooks.
PyObject* handle(PyObject* fallback, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  if (count >= 2 && hook_is_on() && PyTuple_CheckExact(args[1])) {
    bool ours = false, others = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
      PyObject* x = PyTuple_GET_ITEM(args[1], i);
      if (Py_TYPE(x) == global_class()) {
        ours = true;
      } else if (x == Py_None || THPVariable_CheckExact(x)) {
        continue;  // the look-up below would raise and drop an AttributeError for these
      } else if (PyObject_HasAttrString(x, "__torch_function__")) {
        others = true;
      }
    }
    if (ours && !others) return call(args[0], Arguments(args + 2, count - 2, names));
  }
  return PyObject_Vectorcall(fallback, args, count, names);
  END_HANDLE_TH_ERRORS
}

PyMethodDef handle_method = {"handle_torch_function", nullptr, METH_FASTCALL | METH_KEYWORDS,
                             "torch.overrides.handle_torch_function, short of Python where every "
                             "hook asked for is that of global tensors."};

PyObject* make_handle(PyObject*, PyObject* fallback) {
  return PyCFunction_New(&handle_method, fallback);
}

PyObject* getter(PyObject* descriptor, PyObject* tensor) {
  HANDLE_TH_ERRORS
  return of_shard(descriptor, tensor);
  END_HANDLE_TH_ERRORS
}

PyMethodDef getter_method = {"getter", getter, METH_O, "A property of the shard itself."};

PyObject* make_getter(PyObject*, PyObject* descriptor) {
  if (Py_TYPE(descriptor)->tp_descr_get == nullptr) {
    PyErr_Format(PyExc_TypeError, "make_getter: a property is needed, not %R", descriptor);
    return nullptr;
  }
  return PyCFunction_New(&getter_method, descriptor);
}

PyObject* py_attach(PyObject*, PyObject* const* args, Py_ssize_t count) {
  if (count != 2 || !THPVariable_Check(args[0]) || !is_spec(args[1])) {
    PyErr_SetString(PyExc_TypeError, "attach: a plain tensor and a TensorSpec are needed");
    return nullptr;
  }
  if (!attach(args[0], args[1])) return nullptr;
  Py_INCREF(args[0]);
  return args[0];
}

PyObject* py_enter_function(PyObject*, PyObject* function) {
  return PyBool_FromLong(enter_function(function));
}

template <typename Function>
PyCFunction fast(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

PyMethodDef methods[] = {
    {"torch_function", fast(torch_function), METH_FASTCALL,
     "(func, types, args, kwargs) -> result: the hook of GlobalTensor."},
    {"attach", fast(py_attach), METH_FASTCALL,
     "(local, spec) -> local, retyped as the shard of a global tensor; no one else holds it."},
    {"enter_function", py_enter_function, METH_O,
     "(builtin function of torch) -> whether it goes straight to the hook from now on."},
    {"make_getter", make_getter, METH_O,
     "(property of torch.Tensor) -> (tensor) -> what it says of the shard."},
    {"make_handle", make_handle, METH_O,
     "(fallback) -> handle_torch_function, which calls the fallback for hooks of others."},
    {"original", original, METH_O, "(builtin of torch) -> the same past its redirection."},
    {"redirect", fast(redirect), METH_FASTCALL,
     "(builtin of torch, handler, 'always' | 'global' | 'graph', after)"},
    {"redirect_class", fast(redirect_class), METH_FASTCALL, "(class of torch, handler)"},
    {"redirect_property", fast(redirect_property), METH_FASTCALL,
     "(property of torch.Tensor, handler)"},
    {"holds_global", holds_global, METH_O, "(value) -> whether it is or holds a global tensor."},
    {"no_sequence", no_sequence, METH_O, "(class): its instances are not sequences to C code."},
    {"in_backward_of_shards", in_backward_of_shards, METH_O, "(now) -> whether it was so."},
    {"take_nan_found", take_nan_found, METH_NOARGS,
     "() -> what anomaly mode says of the first NaN in backward, or ''."},
    {"read_numbers_by", read_numbers_by, METH_O, "(read): numbers in global tensors are read so."},
    {"refuse_collectives", refuse_collectives, METH_O, "(what to call instead)"},
    {"set_aside", set_aside, METH_NOARGS, "() -> the modes and hooks that were on, now off."},
    {"bring_back", bring_back, METH_O, "(what set_aside gave): they are on again."},
    {"on_first_tensor", on_first_tensor, METH_O,
     "(callable): call it before the first global tensor is made."},
    {"use", use, METH_O, "Look plans up in this table from now on; returns the one before."},
    {"key_of", key_of, METH_VARARGS,
     "(func, args, kwargs, general) -> the key that plans are found by, as bytes and objects."},
    {"forget_functions", forget_functions, METH_NOARGS,
     "Ask again what each function of torch is, as after new ones were entered."},
    {"set_up", set_up, METH_VARARGS,
     "(GlobalTensor, MirroredTensor, TensorSpec, Layout, resolve, make_plan, moved_view_error, "
     "op_tracers, moved_views, freshened, wrote, forward_ad, check_mode, count_lack)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace consistent::dispatch

PyMODINIT_FUNC PyInit__C(void) {
  using namespace consistent::dispatch;
  table_type.tp_name = "consistent.dispatch._C.PlanTable";
  table_type.tp_doc = "Plans by key.";
  table_type.tp_basicsize = sizeof(PyPlanTable);
  table_type.tp_flags = Py_TPFLAGS_DEFAULT;
  table_type.tp_new = table_new;
  table_type.tp_dealloc = table_dealloc;
  table_type.tp_methods = table_methods;
  table_type.tp_getset = table_getters;
  table_type.tp_as_sequence = &table_sequence;
  handle_method.ml_meth = fast(handle);
  PyTypeObject* method = method_type();
  if (PyType_Ready(&table_type) != 0 || method == nullptr) return nullptr;
  PyObject* getter = PyObject_GetAttrString(Py_None, "__repr__");  // has the getters' type too
  if (getter == nullptr) return nullptr;
  getter_type = Py_TYPE(getter);
  Py_DECREF(getter);
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "The dispatch hook.", -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr || !add_leaf_functions(module) ||
      PyModule_AddObjectRef(module, "PlanTable", reinterpret_cast<PyObject*>(&table_type)) != 0 ||
      PyModule_AddObjectRef(module, "Method", reinterpret_cast<PyObject*>(method)) != 0) {
    return nullptr;
  }
  return module;
}
