#include "../../peer/alarm.h"

#include <Python.h>

#include <new>

#include "methods.h"

namespace consistent::peer {
namespace {

// The Python type Alarm. Its Alarm is shared by the groups and Sockets that were given the object.
struct PyAlarm {
  PyObject_HEAD std::shared_ptr<Alarm> alarm;
};

PyTypeObject* alarm_type = nullptr;

PyObject* make_alarm(PyTypeObject* type, PyObject*, PyObject*) {
  PyObject* self = type->tp_alloc(type, 0);
  if (self == nullptr) return nullptr;
  new (&reinterpret_cast<PyAlarm*>(self)->alarm) std::shared_ptr<Alarm>(std::make_shared<Alarm>());
  return self;
}

// A heap type owns a reference from each instance, which tp_dealloc has to release.
void destroy_alarm(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  reinterpret_cast<PyAlarm*>(self)->alarm.~shared_ptr();
  type->tp_free(self);
  Py_DECREF(type);
}

// set_off(words): every group with this alarm raises `words`, where it waits now and in later
// calls.
PyObject* set_off(PyObject* self, PyObject* words) {
  const char* text = PyUnicode_AsUTF8(words);
  if (text == nullptr) return nullptr;
  reinterpret_cast<PyAlarm*>(self)->alarm->set_off(text);
  Py_RETURN_NONE;
}

// words: the message with which the alarm went off, or None.
PyObject* words(PyObject* self, void*) {
  const Alarm& alarm = *reinterpret_cast<PyAlarm*>(self)->alarm;
  if (!alarm.is_on()) Py_RETURN_NONE;
  return PyUnicode_FromString(alarm.words().c_str());
}

PyMethodDef alarm_methods[] = {{"set_off", set_off, METH_O, nullptr},
                               {nullptr, nullptr, 0, nullptr}};
PyGetSetDef alarm_members[] = {{"words", words, nullptr, nullptr, nullptr},
                               {nullptr, nullptr, nullptr, nullptr, nullptr}};
PyType_Slot alarm_slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make_alarm)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy_alarm)},
    {Py_tp_methods, alarm_methods},
    {Py_tp_getset, alarm_members},
    {0, nullptr},
};
PyType_Spec alarm_spec = {"mirrored.transports._C.Alarm", sizeof(PyAlarm), 0, Py_TPFLAGS_DEFAULT,
                          alarm_slots};

}  // namespace

bool add_alarm(PyObject* module) {
  alarm_type = reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&alarm_spec));
  PyObject* type = reinterpret_cast<PyObject*>(alarm_type);
  return type != nullptr && PyModule_AddObjectRef(module, "Alarm", type) == 0;
}

std::shared_ptr<Alarm> alarm_of(PyObject* object) {
  need(PyObject_TypeCheck(object, alarm_type), "an Alarm is needed");
  return reinterpret_cast<PyAlarm*>(object)->alarm;
}

}  // namespace consistent::peer
