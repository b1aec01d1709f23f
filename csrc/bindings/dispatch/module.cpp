// The Python face of the dispatch hook: consistent.tensor._C.

#include <Python.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "function.h"
#include "hook.h"
#include "key.h"
#include "method.h"
#include "plans.h"

namespace consistent::dispatch {
namespace {

struct PyPlanTable {
  PyObject_HEAD PlanTable* table;
};

PyObject* table_new(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) reinterpret_cast<PyPlanTable*>(self)->table = new PlanTable;
  return self;
}

void table_dealloc(PyObject* self) {
  delete reinterpret_cast<PyPlanTable*>(self)->table;
  Py_TYPE(self)->tp_free(self);
}

PyObject* table_clear(PyObject* self, PyObject*) {
  reinterpret_cast<PyPlanTable*>(self)->table->clear();
  Py_RETURN_NONE;
}

PyObject* table_values(PyObject* self, PyObject*) {
  PyObject* list = PyList_New(0);
  if (list == nullptr) return nullptr;
  for (Entry* entry : reinterpret_cast<PyPlanTable*>(self)->table->entries()) {
    if (PyList_Append(list, entry->plan) != 0) {
      Py_DECREF(list);
      return nullptr;
    }
  }
  return list;
}

Py_ssize_t table_length(PyObject* self) {
  return static_cast<Py_ssize_t>(reinterpret_cast<PyPlanTable*>(self)->table->size());
}

PyMethodDef table_methods[] = {
    {"clear", table_clear, METH_NOARGS, "Forget all plans."},
    {"values", table_values, METH_NOARGS, "The plans, in no order."},
    {nullptr, nullptr, 0, nullptr},
};

PySequenceMethods table_sequence = {table_length};

PyTypeObject table_type = {PyVarObject_HEAD_INIT(nullptr, 0)};

PyObject* current = nullptr;  // the PyPlanTable whose table is `plans`

PyObject* use(PyObject*, PyObject* given) {
  if (Py_TYPE(given) != &table_type) {
    PyErr_Format(PyExc_TypeError, "use: a PlanTable is needed, not %R", given);
    return nullptr;
  }
  PyObject* before = current;
  Py_INCREF(given);
  current = given;
  plans = reinterpret_cast<PyPlanTable*>(given)->table;
  if (before != nullptr) return before;
  Py_RETURN_NONE;
}

PyObject* set_up(PyObject*, PyObject* args) {
  PyObject *global_tensor = nullptr, *mirrored_tensor = nullptr;
  Python given;
  if (!PyArg_ParseTuple(args, "OOOOOO!OOO!O", &global_tensor, &mirrored_tensor, &given.make_plan,
                        &given.execute, &given.moved_view_error, &PyList_Type, &given.observers,
                        &given.clear_plans, &given.type_gradient, &PyList_Type, &given.ties,
                        &given.freshened)) {
    return nullptr;
  }
  for (PyObject* part : {given.make_plan, given.execute, given.moved_view_error, given.observers,
                         given.clear_plans, given.type_gradient, given.ties, given.freshened}) {
    Py_INCREF(part);
  }
  set_classes(global_tensor, mirrored_tensor);
  python = given;
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

// torch.overrides.handle_torch_function, for Python functions of torch that ask for hooks.
PyObject* handle(PyObject* fallback, PyObject* const* args, Py_ssize_t count, PyObject* names) {
  HANDLE_TH_ERRORS
  if (count >= 2 && hook_is_on() && PyTuple_CheckExact(args[1])) {
    bool ours = false, others = false;
    for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(args[1]); ++i) {
      PyObject* x = PyTuple_GET_ITEM(args[1], i);
      if (Py_TYPE(x) == global_class()) {
        ours = true;
      } else if (!THPVariable_CheckExact(x) && PyObject_HasAttrString(x, "__torch_function__")) {
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
  if (count != 2) {
    PyErr_SetString(PyExc_TypeError, "attach: a plain tensor and a spec are needed");
    return nullptr;
  }
  if (!attach(args[0], args[1])) return nullptr;
  Py_INCREF(args[0]);
  return args[0];
}

PyObject* py_gradient(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(leaf) != global_class()) {
    PyErr_Format(PyExc_TypeError, "gradient: a global tensor is needed, not a %s",
                 Py_TYPE(leaf)->tp_name);
    return nullptr;
  }
  return gradient(leaf);
  END_HANDLE_TH_ERRORS
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
    {"gradient", py_gradient, METH_O, "(leaf) -> its gradient as a global tensor, or None."},
    {"enter_function", py_enter_function, METH_O,
     "(builtin function of torch) -> whether it goes straight to the hook from now on."},
    {"make_getter", make_getter, METH_O,
     "(property of torch.Tensor) -> (tensor) -> what it says of the shard."},
    {"make_handle", make_handle, METH_O,
     "(fallback) -> handle_torch_function, which calls the fallback for hooks of others."},
    {"use", use, METH_O, "Look plans up in this table from now on; returns the one before."},
    {"set_up", set_up, METH_VARARGS,
     "(GlobalTensor, MirroredTensor, make_plan, execute, moved_view_error, observers, "
     "clear_plans, type_gradient, ties, freshened)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace consistent::dispatch

PyMODINIT_FUNC PyInit__C(void) {
  using namespace consistent::dispatch;
  table_type.tp_name = "consistent.tensor._C.PlanTable";
  table_type.tp_doc = "Plans by key.";
  table_type.tp_basicsize = sizeof(PyPlanTable);
  table_type.tp_flags = Py_TPFLAGS_DEFAULT;
  table_type.tp_new = table_new;
  table_type.tp_dealloc = table_dealloc;
  table_type.tp_methods = table_methods;
  table_type.tp_as_sequence = &table_sequence;
  handle_method.ml_meth = fast(handle);
  PyTypeObject* method = method_type();
  if (PyType_Ready(&table_type) != 0 || method == nullptr) return nullptr;
  static PyModuleDef definition = {PyModuleDef_HEAD_INIT, "_C", "The dispatch hook.", -1, methods};
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr ||
      PyModule_AddObjectRef(module, "PlanTable", reinterpret_cast<PyObject*>(&table_type)) != 0 ||
      PyModule_AddObjectRef(module, "Method", reinterpret_cast<PyObject*>(method)) != 0) {
    return nullptr;
  }
  return module;
}
