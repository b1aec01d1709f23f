#include "functions.h"

#include <c10/util/flat_hash_map.h>

#include "../hook.h"
#include "read.h"

namespace consistent::dispatch {
namespace {

// More functions than torch has. The limit bounds the memory of a program that keeps creating new
// functions.
constexpr size_t kMostKept = 8192;

// Owns a reference to each key and to each value, counted by hand: a look-up has a borrowed key,
// and values have a count of their own. At exit nothing is released, when the interpreter is gone.
ska::flat_hash_map<PyObject*, Function*> known;

// Reads a Sizing, given as an int.
bool read_sizing(PyObject* resolved, Sizing* value) {
  int64_t number = 0;
  if (!read_int(resolved, "sizing", &number)) return false;
  *value = static_cast<Sizing>(number);
  return true;
}

}  // namespace

Function::Function(PyObject* resolved_) : resolved(Py_NewRef(resolved_)) {}

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
  if (made->call.get() == Py_None) made->call = nullptr;
  return made;
}

bool Function::is_free(PyObject* name) const {
  PyObject* const names = free_names.get();  // borrowed
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); ++i) {
    PyObject* known = PyTuple_GET_ITEM(names, i);
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
  THPObjectPtr resolved(PyObject_CallOneArg(python.resolve, function));
  if (!resolved) return nullptr;
  Function* made = Function::of(resolved.get());
  if (made == nullptr || !lasting) return made;
  if (known.size() >= kMostKept) clear_functions();
  // Resolving ran Python code, so another thread may have inserted the function meanwhile.
  if (known.emplace(function, made).second) {
    Py_INCREF(function);
    made->hold();
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
