#include "method.h"

#include <structmember.h>
#include <torch/csrc/Exceptions.h>

#include "hook.h"

namespace consistent::dispatch {
namespace {

// `base` is owned and counted by hand: tp_alloc runs no constructor, tp_free no destructor, and
// `members` reads the pointer at its offset.
struct Method {
  PyObject_HEAD PyObject* base;
  vectorcallfunc vectorcall;
};

PyObject* method_call(PyObject* self, PyObject* const* args, size_t counted, PyObject* names) {
  HANDLE_TH_ERRORS
  PyObject* base = reinterpret_cast<Method*>(self)->base;
  const Py_ssize_t count = PyVectorcall_NARGS(counted);
  if (count == 0 || Py_TYPE(args[0]) != global_class() || !hook_is_on()) {
    return PyObject_Vectorcall(base, args, counted, names);
  }
  return call(base, Arguments(args, count, names));
  END_HANDLE_TH_ERRORS
}

PyObject* method_new(PyTypeObject* type, PyObject* args, PyObject*) {
  PyObject* base = nullptr;
  if (!PyArg_ParseTuple(args, "O", &base)) return nullptr;
  PyObject* self = type->tp_alloc(type, 0);
  if (self != nullptr) {
    reinterpret_cast<Method*>(self)->base = Py_NewRef(base);
    reinterpret_cast<Method*>(self)->vectorcall = method_call;
  }
  return self;
}

void method_dealloc(PyObject* self) {
  Py_XDECREF(reinterpret_cast<Method*>(self)->base);
  Py_TYPE(self)->tp_free(self);
}

PyObject* method_bind(PyObject* self, PyObject* instance, PyObject*) {
  return instance == nullptr ? Py_NewRef(self) : PyMethod_New(self, instance);
}

// __name__ and all other attributes are those of `base`.
PyObject* method_attribute(PyObject* self, PyObject* name) {
  PyObject* found = PyObject_GenericGetAttr(self, name);
  if (found != nullptr || !PyErr_ExceptionMatches(PyExc_AttributeError)) return found;
  PyErr_Clear();
  return PyObject_GetAttr(reinterpret_cast<Method*>(self)->base, name);
}

PyMemberDef members[] = {
    {"__wrapped__", T_OBJECT, offsetof(Method, base), READONLY, "The method of torch.Tensor."},
    {nullptr, 0, 0, 0, nullptr},
};

// Needs a getter: the type's own __doc__ would be found before that of `base`.
PyObject* method_doc(PyObject* self, void*) {
  return PyObject_GetAttrString(reinterpret_cast<Method*>(self)->base, "__doc__");
}

PyGetSetDef getters[] = {
    {"__doc__", method_doc, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyTypeObject type = {PyVarObject_HEAD_INIT(nullptr, 0)};

}  // namespace

PyObject* no_sequence(PyObject*, PyObject* type) {
  if (!PyType_Check(type) ||
      !PyType_HasFeature(reinterpret_cast<PyTypeObject*>(type), Py_TPFLAGS_HEAPTYPE)) {
    PyErr_Format(PyExc_TypeError, "no_sequence: a class made in Python is needed, not %R", type);
    return nullptr;
  }
  reinterpret_cast<PyHeapTypeObject*>(type)->as_sequence.sq_item = nullptr;
  PyType_Modified(reinterpret_cast<PyTypeObject*>(type));
  Py_RETURN_NONE;
}

PyTypeObject* method_type() {
  type.tp_name = "consistent.dispatch._C.Method";
  type.tp_basicsize = sizeof(Method);
  type.tp_vectorcall_offset = offsetof(Method, vectorcall);
  type.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL | Py_TPFLAGS_METHOD_DESCRIPTOR;
  type.tp_call = PyVectorcall_Call;
  type.tp_new = method_new;
  type.tp_dealloc = method_dealloc;
  type.tp_descr_get = method_bind;
  type.tp_getattro = method_attribute;
  type.tp_members = members;
  type.tp_getset = getters;
  return PyType_Ready(&type) == 0 ? &type : nullptr;
}

}  // namespace consistent::dispatch
