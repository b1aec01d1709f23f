// Peer-memory moves between the ranks of one host, as the module mirrored.transports._C.
//
// A Group's methods take and return CPU tensors. They release the GIL while they copy and wait. All
// methods raise RuntimeError on every rank if the ranks' calls do not match or if a rank has died.

#include <Python.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "methods.h"

namespace consistent::peer {
namespace {

struct PyGroup {
  PyObject_HEAD Group* group;
  PyObject* explain;  // owned; (group, text) -> the message for calls that do not match; or null
};

Group& group_of(PyObject* self) { return *reinterpret_cast<PyGroup*>(self)->group; }

// ---- the type -----------------------------------------------------------------------------------

template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const pybind11::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

void raise_explained(PyObject* self, const char* text) {
  PyObject* explain = reinterpret_cast<PyGroup*>(self)->explain;
  explaining = true;
  PyObject* words = explain != nullptr ? PyObject_CallFunction(explain, "Os", self, text)
                                       : PyUnicode_FromString(text);
  explaining = false;
  if (words != nullptr) PyErr_SetObject(PyExc_RuntimeError, words);
  Py_XDECREF(words);
}

// Whether an error means that there was no memory. torch's CPU allocator throws a plain c10::Error,
// so that one is recognized by its text.
bool is_lack(const std::exception& error) {
  if (dynamic_cast<const std::bad_alloc*>(&error) != nullptr) return true;
  const auto* raised = dynamic_cast<const pybind11::error_already_set*>(&error);
  if (raised != nullptr) return raised->matches(PyExc_MemoryError);
  const auto* torchs = dynamic_cast<const c10::Error*>(&error);
  return torchs != nullptr && torchs->msg().find("t allocate memory") != std::string::npos;
}

using Method = PyObject* (*)(Group&, Arguments);

// Calls a move that all members make. If this member has no memory for the move, all members raise.
template <Method method>
PyObject* together(Group& group, Arguments arguments) {
  const uint64_t before = group.steps();
  try {
    return method(group, arguments);
  } catch (const std::exception& error) {
    if (!is_lack(error)) throw;
  }
  const pybind11::gil_scoped_release free;
  group.refuse(before);
}

template <Method method, int count>
PyObject* entry(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  return guarded([&]() -> PyObject* {
    need(given == count, "wrong number of arguments");
    try {
      PyObject* result = method(group_of(self), arguments);
      // Methods run without the GIL when they return Py_None, so the reference is taken here.
      if (result == Py_None) Py_INCREF(result);
      return result;
    } catch (const Mismatch& error) {  // thrown on all members, whose `explain` may communicate
      raise_explained(self, error.what());
      return nullptr;
    }
  });
}

#define ENTRY(NAME, FUNCTION, COUNT)                                                      \
  {NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&entry<FUNCTION, COUNT>)), \
   METH_FASTCALL, nullptr}
#define METHOD(NAME, COUNT) ENTRY(#NAME, NAME, COUNT)
#define MOVE(NAME, COUNT) ENTRY(#NAME, together<NAME>, COUNT)

PyMethodDef methods[] = {
    MOVE(all_reduce, 3),
    MOVE(reduce_scatter, 4),
    MOVE(all_gather, 3),
    MOVE(all_to_all, 5),
    MOVE(reduce_scatter_several, 4),
    MOVE(all_gather_several, 4),
    MOVE(gather_into, 2),
    MOVE(all_to_all_into, 3),
    MOVE(broadcast, 4),
    MOVE(gather_objects, 1),
    MOVE(stage, 1),
    METHOD(unstage, 0),
    METHOD(refuse, 0),
    METHOD(unlink, 0),
    METHOD(set_one_shot, 2),
    METHOD(room, 0),
    METHOD(grow, 2),
    METHOD(shrink, 0),
    METHOD(meet_all_reduce, 2),
    METHOD(meet_reduce_scatter, 4),
    METHOD(meet_all_gather, 3),
    METHOD(meet_all_to_all, 5),
    METHOD(meet_broadcast, 4),
    METHOD(meet_peers, 1),
    METHOD(waiting, 0),
    {nullptr, nullptr, 0, nullptr},
};

// Whether a signal handler raised. Its Python error stays set, and guarded() does not replace it.
bool interrupted() {
  const pybind11::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

// The message that the Python function give_up(why) returns, or `why` itself if the function
// raises. A Python error that was set before, such as KeyboardInterrupt, stays set; otherwise an
// error that give_up raises does.
std::string words_of(const pybind11::object& give_up, const std::string& why) {
  const pybind11::gil_scoped_acquire held;
  PyObject *type, *value, *trace;
  PyErr_Fetch(&type, &value, &trace);
  PyObject* words = PyObject_CallFunction(give_up.ptr(), "s", why.c_str());
  const char* text = words != nullptr ? PyUnicode_AsUTF8(words) : nullptr;
  const std::string said = text != nullptr ? text : why;
  Py_XDECREF(words);
  if (type != nullptr) PyErr_Restore(type, value, trace);
  return said;
}

// Group(name, me, ranks, slot_bytes, timeout_s, alarm, give_up, explain); the last three may be
// left out. If name is None, the segment is created, else the named one is mapped.
PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    const char* name = nullptr;
    PyObject *ranks = nullptr, *alarm = nullptr, *give_up = nullptr, *explain = nullptr;
    int me = 0;
    long long slot_bytes = 0;
    double timeout_s = 0;
    if (!PyArg_ParseTuple(arguments, "ziOLd|OOO", &name, &me, &ranks, &slot_bytes, &timeout_s,
                          &alarm, &give_up, &explain)) {
      return nullptr;
    }
    Callbacks callbacks;
    callbacks.interrupted = interrupted;
    if (alarm != nullptr) callbacks.alarm = alarm_of(alarm);
    if (give_up != nullptr) {
      const auto function = pybind11::reinterpret_borrow<pybind11::object>(give_up);
      callbacks.give_up = [function](const std::string& why) { return words_of(function, why); };
    }
    const Sizes all = integers(ranks);
    const int n = int(all.size());
    need(n >= 2 && 0 <= me && me < n, "this rank must be one of two or more");
    need(slot_bytes >= 64 * n, "a slot needs 64 bytes a rank");
    const size_t bytes = Group::segment_bytes(n, slot_bytes);
    Segment segment = name == nullptr ? Segment::create(bytes) : Segment::attach(name, bytes);
    auto group =
        std::make_unique<Group>(std::move(segment), me, std::vector<int>(all.begin(), all.end()),
                                slot_bytes, timeout_s, std::move(callbacks));
    PyObject* self = type->tp_alloc(type, 0);
    if (self == nullptr) return nullptr;
    reinterpret_cast<PyGroup*>(self)->group = group.release();
    Py_XINCREF(explain);
    reinterpret_cast<PyGroup*>(self)->explain = explain;
    return self;
  });
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PyGroup*>(self)->group;
  Py_XDECREF(reinterpret_cast<PyGroup*>(self)->explain);
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* name(PyObject* self, void*) {
  return PyUnicode_FromString(group_of(self).name().c_str());
}

PyGetSetDef members[] = {
    {"name", name, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, members},
    {0, nullptr},
};

PyType_Spec group_type = {"mirrored.transports._C.Group", sizeof(PyGroup), 0, Py_TPFLAGS_DEFAULT,
                          slots};

PyObject* host(PyObject*, PyObject*) {
  return guarded([] { return PyUnicode_FromString(host_identity().c_str()); });
}

PyObject* clean(PyObject*, PyObject*) {
  return guarded([] {
    remove_abandoned();
    Py_RETURN_NONE;
  });
}

PyObject* in_call(PyObject*, PyObject*) { return PyBool_FromLong(is_in_call()); }
PyObject* add_failures(PyObject*, PyObject* number) {
  const long long added = PyLong_AsLongLong(number);
  if (added == -1 && PyErr_Occurred()) return nullptr;
  consistent::peer::add_failures(added);
  Py_RETURN_NONE;
}

PyObject* count_failures(PyObject*, PyObject*) { return PyLong_FromLongLong(failures.load()); }

PyMethodDef functions[] = {
    {"add_failures", add_failures, METH_O,
     "Adds to how often this process has met what the others may not have met."},
    {"count_failures", count_failures, METH_NOARGS, "How often that was."},
    {"host_identity", host, METH_NOARGS, "What is equal for processes that can share memory."},
    {"remove_abandoned", clean, METH_NOARGS, "Unlinks the segments of dead processes."},
    {"is_in_call", in_call, METH_NOARGS, "Whether this thread is in a call of a Group."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace consistent::peer

PyMODINIT_FUNC PyInit__C(void) {
  using namespace consistent::peer;
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions};
  PyObject* made = PyModule_Create(&module);
  PyObject* type = made ? PyType_FromSpec(&group_type) : nullptr;
  if (type == nullptr || PyModule_AddObject(made, "Group", type) != 0) return nullptr;
  if (!add_alarm(made)) return nullptr;
  return guarded([made] {
    add_sockets(made);
    add_device_moves(made);
    return made;
  });
}
