// The key of a call: the function, the interned specs of its global tensors, its static arguments.
//
// A key is a flat list of atoms, 16 bytes each, that two equal calls have equal. Specs are
// interned, so their addresses stand for them; floats stand for their type only; what has no short
// stand-in (strings, dtypes, devices, ...) gives its hash, and the object itself is compared.

#pragma once

#include <Python.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace consistent::dispatch {

struct Atom {
  uint64_t kind;
  uint64_t value;
};

// The arguments of a call, borrowed: values in order, then those named by `names` (a tuple or
// nullptr), or else by `dict` (or nullptr).
struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;  // of values that are not named
  PyObject* names = nullptr;
  PyObject* tuple = nullptr;  // the same as a tuple and a dict, where they came so
  PyObject* dict = nullptr;

  Arguments(PyObject* const* values_, Py_ssize_t count_, PyObject* names_)
      : values(values_), count(count_), names(names_) {}
  Arguments(PyObject* tuple_, PyObject* dict_)
      : values(&PyTuple_GET_ITEM(tuple_, 0)),
        count(PyTuple_GET_SIZE(tuple_)),
        tuple(tuple_),
        dict(dict_) {}
  // func(*arguments), a new reference.
  PyObject* pass_to(PyObject* func) const;
  // Those that are not named, and those that are, as new references.
  PyObject* as_tuple() const;
  PyObject* as_dict() const;
  // Both; false with a Python error set.
  bool as_tuple_and_dict(PyObject** args, PyObject** kwargs) const;
};

// What the key borrows is held by the call's arguments, or by `made_`.
struct Key {
  c10::SmallVector<Atom, 40> atoms;
  c10::SmallVector<PyObject*, 12> objects;  // compared by ==, in the order of their atoms
  c10::SmallVector<PyObject*, 12> specs;    // the addresses among the atoms, to be kept alive
  uint64_t hash = 0;
  bool tied = false;  // one of the tensors is a moved view; only looked for if `look_for_ties`

  explicit Key(bool look_for_ties) : look_for_ties_(look_for_ties) {}
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;
  ~Key();

  // Keeps what the key borrows alive, whatever the call's arguments turn into meanwhile.
  void hold();

  // Fills in the key of func(*arguments); false with a Python error set.
  bool of_call(PyObject* func, const Arguments& arguments);

 private:
  const bool look_for_ties_;
  bool add(PyObject* argument);
  bool add_tuple(PyObject* sequence, uint64_t kind);
  bool add_dict(PyObject* dict);
  bool add_tensor(PyObject* tensor);
  bool add_object(PyObject* object);
  c10::SmallVector<PyObject*, 4> made_;  // new references, owned by the key
  void put(uint64_t kind, uint64_t value) { atoms.push_back({kind, value}); }
};

// The class whose instances carry a spec; MirroredTensor, which no plan serves.
void set_classes(PyObject* global_tensor, PyObject* mirrored_tensor);
PyTypeObject* global_class();

// The `_spec` of a global tensor, borrowed; nullptr with a Python error set.
PyObject* spec_of(PyObject* tensor);
// Whether it is a view that boxing moved; -1 with a Python error set.
int is_moved(PyObject* tensor);

}  // namespace consistent::dispatch
