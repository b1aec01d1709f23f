#include "redirect_class.h"

#include "holds.h"

namespace consistent::dispatch {

namespace {

constexpr size_t kMostClasses = 4;  // different tp_new slots that can be redirected

struct RedirectedClass {
  newfunc original;
  PyObject* handler;
};

RedirectedClass redirected_classes[kMostClasses];
size_t class_count = 0;

template <size_t I>
PyObject* make_instance(PyTypeObject* type, PyObject* args, PyObject* kwargs) {
  const RedirectedClass& to = redirected_classes[I];
  if (!hooks_are_on() || !(holds(args) || holds(kwargs))) return to.original(type, args, kwargs);
  PyObject* first = PyTuple_Pack(1, type);
  PyObject* all = first ? PySequence_Concat(first, args) : nullptr;
  PyObject* out = all ? PyObject_Call(to.handler, all, kwargs) : nullptr;
  Py_XDECREF(all);
  Py_XDECREF(first);
  return out;
}

constexpr newfunc kMakers[kMostClasses] = {make_instance<0>, make_instance<1>, make_instance<2>,
                                           make_instance<3>};

size_t maker_of(newfunc before, PyObject* handler) {
  for (size_t i = 0; i < class_count; ++i) {
    if (redirected_classes[i].original == before && redirected_classes[i].handler == handler)
      return i;
  }
  if (class_count == kMostClasses) return kMostClasses;
  redirected_classes[class_count] = {before, Py_NewRef(handler)};
  return class_count++;
}

// Replaces tp_new in the type and its subclasses, which inherited a copy of the slot when they were
// created.
bool replace_new(PyTypeObject* type, newfunc before, newfunc ours) {
  if (type->tp_new != before) return true;
  type->tp_new = ours;
  PyObject* subclasses =
      PyObject_CallMethod(reinterpret_cast<PyObject*>(&PyType_Type), "__subclasses__", "O", type);
  if (subclasses == nullptr) return false;
  bool done = true;
  for (Py_ssize_t i = 0; done && i < PyList_GET_SIZE(subclasses); ++i) {
    done =
        replace_new(reinterpret_cast<PyTypeObject*>(PyList_GET_ITEM(subclasses, i)), before, ours);
  }
  Py_DECREF(subclasses);
  return done;
}

}  // namespace

PyObject* redirect_class(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 2 || !PyType_Check(args[0])) {
    PyErr_SetString(PyExc_TypeError, "redirect_class: a class and a handler are needed");
    return nullptr;
  }
  auto* type = reinterpret_cast<PyTypeObject*>(args[0]);
  const newfunc before = type->tp_new;
  const size_t index = maker_of(before, args[1]);
  if (index == kMostClasses) {
    PyErr_Format(PyExc_RuntimeError, "redirect_class: no place for %R", args[0]);
    return nullptr;
  }
  if (!replace_new(type, before, kMakers[index])) return nullptr;
  Py_RETURN_NONE;
}

}  // namespace consistent::dispatch
