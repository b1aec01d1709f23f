#include "redirect_property.h"

#include <array>
#include <utility>

#include "../lookup/key.h"
#include "holds.h"

namespace consistent::dispatch {
namespace {

constexpr size_t kMostProperties = 16;  // properties that can be redirected

struct RedirectedProperty {
  setter original;
  PyObject* handler;
};

RedirectedProperty redirected_properties[kMostProperties];
size_t property_count = 0;

// Trampolines, as in redirect.cpp: several of torch's setters get the same closure, so the closure
// cannot carry the index I.
template <size_t I>
int assign(PyObject* owner, PyObject* value, void* closure) {
  const RedirectedProperty& to = redirected_properties[I];
  const bool ours = value != nullptr && Py_TYPE(value) == global_class() &&
                    Py_TYPE(owner) != global_class() && hooks_are_on();
  if (!ours) return to.original(owner, value, closure);
  PyObject* done = PyObject_CallFunctionObjArgs(to.handler, owner, value, nullptr);
  Py_XDECREF(done);
  return done != nullptr ? 0 : -1;
}

template <size_t... I>
constexpr std::array<setter, kMostProperties> setters(std::index_sequence<I...>) {
  return {assign<I>...};
}

}  // namespace

PyObject* redirect_property(PyObject*, PyObject* const* args, Py_ssize_t n) {
  static constexpr auto kAll = setters(std::make_index_sequence<kMostProperties>());
  PyGetSetDef* property = n == 2 && Py_IS_TYPE(args[0], &PyGetSetDescr_Type)
                              ? reinterpret_cast<PyGetSetDescrObject*>(args[0])->d_getset
                              : nullptr;
  if (property == nullptr || property->set == nullptr) {
    PyErr_SetString(PyExc_TypeError,
                    "redirect_property: a property of torch that can be assigned, and a handler, "
                    "are needed");
    return nullptr;
  }
  if (property_count == kMostProperties) {
    PyErr_Format(PyExc_RuntimeError, "redirect_property: no place for %R", args[0]);
    return nullptr;
  }
  redirected_properties[property_count] = {property->set, Py_NewRef(args[1])};
  property->set = kAll[property_count++];
  Py_RETURN_NONE;
}

}  // namespace consistent::dispatch
