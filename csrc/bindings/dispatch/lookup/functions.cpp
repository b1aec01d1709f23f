#include "functions.h"

#include <c10/util/flat_hash_map.h>

#include "../hook.h"
#include "read.h"

namespace consistent::dispatch {
namespace {

// More functions than torch has. The limit bounds the memory of a program that keeps creating new
// functions.
constexpr size_t kMostKept = 8192;

// Owns a reference to each key and to each value.
ska::flat_hash_map<PyObject*, Function*> known;

// Reads a Sizing, given as an int.
bool read_sizing(PyObject* resolved, Sizing* value) {
  int64_t number = 0;
  if (!read_int(resolved, "sizing", &number)) return false;
  *value = static_cast<Sizing>(number);
  return true;
}

}  // namespace

Function::Function(PyObject* resolved_)
    : resolved(Py_NewRef(resolved_)), call(nullptr), free_names(nullptr) {}

Function::~Function() {
  Py_DECREF(resolved);
  Py_XDECREF(call);
  Py_XDECREF(free_names);
}

Function* Function::of(PyObject* resolved) {
  auto* made = new Function(resolved);
  int64_t free = 0;
  const bool read = read_object(resolved, "call", &made->call) &&
                    read_object(resolved, "free_names", &made->free_names) &&
                    read_int(resolved, "free", &free) && read_sizing(resolved, &made->sizing);
  if (!read) {
    made->drop();
    return nullptr;
  }
  made->free = static_cast<uint32_t>(free);
  if (made->call == Py_None) Py_CLEAR(made->call);
  return made;
}

bool Function::is_free(PyObject* name) const {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(free_names); ++i) {
    PyObject* known = PyTuple_GET_ITEM(free_names, i);
    if (known == name || PyUnicode_Compare(known, name) == 0) return true;
  }
  return false;
}

Function* function_of(PyObject* function, bool lasting) {
  const auto found = known.find(function);
  if (found != known.end()) {
    found->second->hold();
    return found->second;
  }
  PyObject* resolved = PyObject_CallOneArg(python.resolve, function);
  if (resolved == nullptr) return nullptr;
  Function* made = Function::of(resolved);
  Py_DECREF(resolved);
  if (made == nullptr || !lasting) return made;
  if (known.size() >= kMostKept) clear_functions();
  if (known.emplace(Py_NewRef(function), made).second) {
    made->hold();
  } else {
    Py_DECREF(function);  // resolving ran Python code, and another thread has inserted the function
  }
  return made;
}

void clear_functions() {
  ska::flat_hash_map<PyObject*, Function*> before;
  before.swap(known);  // releasing objects may run Python code, which must find the table empty
  for (const auto& [function, entry] : before) {
    entry->drop();
    Py_DECREF(function);
  }
}

}  // namespace consistent::dispatch
