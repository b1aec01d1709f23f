#include "redirect.h"

#include <torch/csrc/utils/object_ptr.h>

#include <array>
#include <utility>

#include "../lookup/key.h"
#include "graph.h"
#include "holds.h"

namespace consistent::dispatch {
namespace {

constexpr size_t kMostFunctions = 160;  // functions that can be redirected

using Asks = bool (*)(PyObject* self, PyObject* args, PyObject* kwargs);

bool always(PyObject*, PyObject*, PyObject*) { return true; }

bool given_global(PyObject* self, PyObject* args, PyObject* kwargs) {
  return hooks_are_on() && (holds(self) || holds(args) || holds(kwargs));
}

bool graph_is_global(PyObject* self, PyObject* args, PyObject* kwargs) {
  if (!hooks_are_on()) return false;
  if (holds(args)) return true;
  return args != nullptr && PyTuple_GET_SIZE(args) != 0 &&
         reaches_global(PyTuple_GET_ITEM(args, 0));
}

struct Redirected {
  PyCFunction original;
  PyObject* handler;
  Asks asks;        // whether a call goes to the handler
  bool bound;       // a method: the handler gets the instance or class before the arguments
  PyObject* after;  // (result, *arguments) -> result, if torch's result holds a global tensor
  vectorcallfunc vectorcall =
      nullptr;  // the one before ours, of a function that keeps its C function
};

// The handlers are owned and never released: torch's functions refer to these entries until the
// process ends.
Redirected redirected[kMostFunctions];
size_t count = 0;

// The tuple (first, *rest); null with a Python error set.
THPObjectPtr prepended(PyObject* first, PyObject* rest) {
  THPObjectPtr one(PyTuple_Pack(1, first));
  return THPObjectPtr(one ? PySequence_Concat(one.get(), rest) : nullptr);
}

// The arguments for the handler, `self` first if it is a method; null with a Python error set.
THPObjectPtr with_self(const Redirected& to, PyObject* self, PyObject* args) {
  return to.bound ? prepended(self, args) : THPObjectPtr(Py_NewRef(args));
}

// Whether the call goes to the handler. If so, it is called and `out` is its result, a new
// reference or null.
bool handled(const Redirected& to, PyObject* self, PyObject* args, PyObject* kwargs,
             PyObject** out) {
  if (!to.asks(to.bound ? self : nullptr, args, kwargs)) return false;
  THPObjectPtr all = with_self(to, self, args);
  *out = all ? PyObject_Call(to.handler, all.get(), kwargs) : nullptr;
  return true;
}

// The result of a call that went to torch: `out`, or after(out, ...) if `out` holds a global
// tensor. Takes over the reference to `out`.
PyObject* looked_at(const Redirected& to, PyObject* self, PyObject* args, THPObjectPtr out) {
  if (to.after == Py_None || !hooks_are_on() || !holds(out.get())) return out.release();
  THPObjectPtr given = with_self(to, self, args);
  if (!given) return nullptr;
  THPObjectPtr all = prepended(out.get(), given.get());
  return all ? PyObject_Call(to.after, all.get(), nullptr) : nullptr;
}

// Trampolines. A C function cannot carry data, so each redirected function I gets its own instance
// of these templates, one for each calling convention.
template <size_t I>
PyObject* with_keywords(PyObject* self, PyObject* args, PyObject* kwargs) {
  PyObject* out = nullptr;
  if (handled(redirected[I], self, args, kwargs, &out)) return out;
  out = reinterpret_cast<PyCFunctionWithKeywords>(
      reinterpret_cast<void (*)()>(redirected[I].original))(self, args, kwargs);
  return looked_at(redirected[I], self, args, THPObjectPtr(out));
}

template <size_t I>
PyObject* with_tuple(PyObject* self, PyObject* args) {
  PyObject* out = nullptr;
  if (handled(redirected[I], self, args, nullptr, &out)) return out;
  return looked_at(redirected[I], self, args, THPObjectPtr(redirected[I].original(self, args)));
}

template <size_t I>
PyObject* with_one(PyObject* self, PyObject* argument) {
  {
    // METH_O or METH_NOARGS.
    THPObjectPtr args(argument ? PyTuple_Pack(1, argument) : PyTuple_New(0));
    if (!args) return nullptr;
    PyObject* out = nullptr;
    if (handled(redirected[I], self, args.get(), nullptr, &out)) return out;
  }
  return redirected[I].original(self, argument);
}

// The result of the handler for arguments that came as an array.
PyObject* handler_called(const Redirected& to, const Arguments& given) {
  THPObjectPtr args, kwargs;
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  return PyObject_Call(to.handler, args.get(), kwargs.get());
}

bool any_holds(PyObject* const* values, Py_ssize_t n) {
  for (Py_ssize_t i = 0; i < n; ++i) {
    if (holds(values[i])) return true;
  }
  return false;
}

// For pybind11's functions. No tuple is made for a call that goes to torch.
template <size_t I>
PyObject* with_array(PyObject* self, PyObject* const* values, Py_ssize_t n, PyObject* names) {
  const Redirected& to = redirected[I];
  const Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
  const bool asked = to.asks == always || (hooks_are_on() && any_holds(values, all));
  if (!asked) {
    return reinterpret_cast<PyObject* (*)(PyObject*, PyObject* const*, Py_ssize_t, PyObject*)>(
        reinterpret_cast<void (*)()>(to.original))(self, values, n, names);
  }
  return handler_called(to, Arguments(values, n, names));
}

PyObject* as_torch_does(const Redirected& to, PyObject* function, PyObject* const* values,
                        size_t counted, PyObject* names) {
  if (to.vectorcall != nullptr) return to.vectorcall(function, values, counted, names);
  THPObjectPtr args, kwargs;
  const Arguments given(values, PyVectorcall_NARGS(counted), names);
  if (!given.as_tuple_and_dict(&args, &kwargs)) return nullptr;
  return PyCFunction_Type.tp_call(function, args.get(), kwargs.get());
}

// Functions of torch's modules are used as dict keys, and their hash includes the address of the C
// function. So the C function must stay, and they get a vectorcall, which torch leaves null.
template <size_t I>
PyObject* with_vector(PyObject* function, PyObject* const* values, size_t counted,
                      PyObject* names) {
  const Redirected& to = redirected[I];
  const Py_ssize_t n = PyVectorcall_NARGS(counted);
  const Py_ssize_t all = n + (names ? PyTuple_GET_SIZE(names) : 0);
  const bool asked = to.asks == always || (hooks_are_on() && any_holds(values, all));
  if (!asked) return as_torch_does(to, function, values, counted, names);
  return handler_called(to, Arguments(values, n, names));
}

template <typename Function>
PyCFunction plain(Function function) {
  return reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(function));
}

struct Trampolines {
  PyCFunction keywords, tuple, one, array;
  vectorcallfunc vector;
};

template <size_t... I>
std::array<Trampolines, kMostFunctions> made(std::index_sequence<I...>) {
  return {Trampolines{plain(with_keywords<I>), plain(with_tuple<I>), plain(with_one<I>),
                      plain(with_array<I>), with_vector<I>}...};
}

const Trampolines& trampolines(size_t index) {
  static const std::array<Trampolines, kMostFunctions> all =
      made(std::make_index_sequence<kMostFunctions>());
  return all[index];
}

PyCFunction trampoline(size_t index, int flags) {
  const Trampolines& mine = trampolines(index);
  switch (flags & ~(METH_CLASS | METH_STATIC | METH_COEXIST)) {
    case METH_VARARGS | METH_KEYWORDS:
      return mine.keywords;
    case METH_VARARGS:
      return mine.tuple;
    case METH_O:
    case METH_NOARGS:
      return mine.one;
    case METH_FASTCALL | METH_KEYWORDS:
      return mine.array;
    default:
      return nullptr;
  }
}

// -- what a callable is made of -------------------------------------------------------------------

struct Builtin {
  PyMethodDef* definition = nullptr;
  PyObject* callable = nullptr;  // borrowed: without the wrapping of pybind's methods
  bool bound = false;
};

bool is_descriptor(PyObject* x) {
  return Py_IS_TYPE(x, &PyMethodDescr_Type) || Py_IS_TYPE(x, &PyClassMethodDescr_Type);
}

Builtin builtin_of(PyObject* callable) {
  if (PyInstanceMethod_Check(callable)) callable = PyInstanceMethod_GET_FUNCTION(callable);
  if (PyCFunction_CheckExact(callable)) {
    return {reinterpret_cast<PyCFunctionObject*>(callable)->m_ml, callable, false};
  }
  if (is_descriptor(callable)) {
    return {reinterpret_cast<PyMethodDescrObject*>(callable)->d_method, callable, true};
  }
  PyErr_Format(PyExc_TypeError, "redirect: a builtin function or method is needed, not %R",
               callable);
  return {};
}

Asks asks_of(PyObject* when) {
  if (PyUnicode_CompareWithASCIIString(when, "always") == 0) return always;
  if (PyUnicode_CompareWithASCIIString(when, "global") == 0) return given_global;
  if (PyUnicode_CompareWithASCIIString(when, "graph") == 0) return graph_is_global;
  PyErr_Format(PyExc_ValueError, "redirect: always, global or graph is needed, not %R", when);
  return nullptr;
}

}  // namespace

PyObject* original(PyObject*, PyObject* callable) {
  const Builtin found = builtin_of(callable);
  if (found.definition == nullptr) return nullptr;
  auto* copy = new PyMethodDef(*found.definition);  // never freed: the new object points to it
  if (!found.bound) {
    auto* function = reinterpret_cast<PyCFunctionObject*>(found.callable);
    return PyCFunction_NewEx(copy, function->m_self, function->m_module);
  }
  PyTypeObject* type = reinterpret_cast<PyDescrObject*>(found.callable)->d_type;
  return Py_IS_TYPE(found.callable, &PyMethodDescr_Type) ? PyDescr_NewMethod(type, copy)
                                                         : PyDescr_NewClassMethod(type, copy);
}

PyObject* redirect(PyObject*, PyObject* const* args, Py_ssize_t n) {
  if (n != 4) {
    PyErr_SetString(PyExc_TypeError, "redirect: a callable, a handler, when and after are needed");
    return nullptr;
  }
  const Builtin found = builtin_of(args[0]);
  const Asks asks = found.definition ? asks_of(args[2]) : nullptr;
  if (asks == nullptr) return nullptr;
  const PyCFunction ours =
      count < kMostFunctions ? trampoline(count, found.definition->ml_flags) : nullptr;
  if (ours == nullptr) {
    PyErr_Format(PyExc_RuntimeError, "redirect: no place for %R", args[0]);
    return nullptr;
  }
  redirected[count++] = {found.definition->ml_meth, Py_NewRef(args[1]), asks, found.bound,
                         Py_NewRef(args[3])};
  // Only METH_VARARGS functions are always called by their vectorcall: the interpreter calls those
  // of other conventions directly.
  const bool by_vectorcall = PyCFunction_CheckExact(found.callable) && asks != graph_is_global &&
                             (found.definition->ml_flags & METH_VARARGS) != 0;
  if (by_vectorcall) {
    auto* function = reinterpret_cast<PyCFunctionObject*>(found.callable);
    redirected[count - 1].vectorcall = function->vectorcall;
    function->vectorcall = trampolines(count - 1).vector;
  } else {
    found.definition->ml_meth = ours;
  }
  Py_RETURN_NONE;
}

}  // namespace consistent::dispatch
