// The keys of a call: flat lists of atoms of 16 bytes, which are equal for equal calls.
//
// The *exact* key consists of the function, the specs of the global tensors and the other
// arguments. Specs are interned, so their addresses stand for them. Of a float the key has the
// type, whether it is 0 and whether it is finite, since addends (partial values) may be multiplied
// only by some floats. An object without a short representation (a string, dtype, device, ...) adds
// its hash to the atoms and is itself compared by ==. If a plan also depends on *facts* (values of
// floats, whether gradients are recorded), these are added. Under autocast the key has the autocast
// dtype, and if the program has set a default dtype, that one.
//
// The *general* key has layouts instead of specs, and, per dim, whether the size is 0 or 1 or less
// than the number of pieces of the layout, so that some ranks have none. Of integers that do not
// affect the layouts of the function's results it has only whether they are 0. If all global
// tensors of a call are broadcast, it has no sizes, and all integers count so: such an op runs as
// it is called, whatever the sizes.

#pragma once

#include <Python.h>
#include <c10/core/DeviceType.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstdint>

#include "functions.h"

namespace consistent::dispatch {

struct Atom {
  uint64_t kind;
  uint64_t value;
};

// The arguments of a call, all borrowed: the positional values in order, then the values of keyword
// arguments, whose names are in `names` (a tuple). In a call that came with a tuple and a dict, the
// keyword arguments are in `dict` instead. `names` and `dict` may be null.
struct Arguments {
  PyObject* const* values;
  Py_ssize_t count;  // number of values that are not named
  PyObject* names = nullptr;
  PyObject* tuple = nullptr;  // the same as a tuple and a dict, if the call came with them
  PyObject* dict = nullptr;

  Arguments(PyObject* const* values_, Py_ssize_t count_, PyObject* names_)
      : values(values_), count(count_), names(names_) {}
  Arguments(PyObject* tuple_, PyObject* dict_)
      : values(&PyTuple_GET_ITEM(tuple_, 0)),
        count(PyTuple_GET_SIZE(tuple_)),
        tuple(tuple_),
        dict(dict_) {}
  // The number of values, including those of keyword arguments unless they are in `dict`.
  Py_ssize_t all() const { return count + (names == nullptr ? 0 : PyTuple_GET_SIZE(names)); }
  // The number of tensors among these values, not counting those inside lists.
  size_t tensors_on_top() const;
  // The result of func(*arguments), a new reference.
  PyObject* pass_to(PyObject* func) const;
  // The positional arguments as a tuple, and the keyword arguments as a dict; null with a Python
  // error set.
  THPObjectPtr as_tuple() const;
  THPObjectPtr as_dict() const;
  // Both; false with a Python error set.
  bool as_tuple_and_dict(THPObjectPtr* args, THPObjectPtr* kwargs) const;
};

// The key of a call. The objects in its vectors are borrowed: the call's arguments keep them alive,
// or `made_` does.
struct Key {
  c10::SmallVector<Atom, 40> atoms;
  c10::SmallVector<PyObject*, 12> objects;  // compared by ==, in the order of their atoms
  c10::SmallVector<PyObject*, 12> held;     // objects whose addresses are in the atoms
  c10::SmallVector<PyObject*, 8> tensors;   // all tensors among the arguments, in order
  uint64_t hash = 0;
  bool lasting = true;  // a plan found by this key is right for the next call with this key
  bool moved = false;   // a tensor is a moved view; only checked if `look_for_moved`

  explicit Key(bool look_for_moved = false) : look_for_moved_(look_for_moved) {}
  Key(const Key&) = delete;
  Key& operator=(const Key&) = delete;

  // Takes references to what the key borrows, so that the key stays valid while Python code runs.
  void hold();

  // Fills in the exact key of func(*arguments); false with a Python error set.
  bool of_call(PyObject* func, const Arguments& arguments);
  // Adds facts to the key: the floats' values, and whether gradients are asked for.
  bool add_facts(const Arguments& arguments, bool values, bool tracked);
  // Fills in the general key of the call that has the exact key `exact`.
  bool of_any_size(PyObject* func, const Function& function, const Arguments& arguments,
                   const Key& exact);

 private:
  enum class Mode : uint8_t { kExact, kAnySize, kWhole };

  const bool look_for_moved_;
  Mode mode_ = Mode::kExact;
  c10::SmallVector<THPObjectPtr, 4> made_;

  bool add_call(PyObject* func, const Function* function, const Arguments& arguments);
  // `free`: integers in `argument` do not affect the plan.
  bool add(PyObject* argument, bool free);
  bool add_int(PyObject* number, bool free);
  bool add_tuple(PyObject* sequence, uint64_t kind, bool free);
  bool add_list(PyObject* list, uint64_t kind, bool free);
  bool add_dict(PyObject* dict, uint64_t kind, const Function* function);
  bool add_global(PyObject* tensor);
  bool add_plain(PyObject* tensor);
  bool add_sizes(c10::ArrayRef<int64_t> sizes, c10::ArrayRef<int64_t> parts);
  bool add_object(PyObject* object);
  void add_autocast(at::DeviceType device);
  void add_default_dtype();
  bool add_floats(PyObject* argument);
  void put(uint64_t kind, uint64_t value) { atoms.push_back({kind, value}); }
  void finish();
};

// Sets the class whose instances carry a spec, and MirroredTensor, for which there are no plans.
void set_classes(PyObject* global_tensor, PyObject* mirrored_tensor);
PyTypeObject* global_class();

// The `_spec` of a global tensor, borrowed; nullptr with a Python error set.
PyObject* spec_of(PyObject* tensor);
// Whether `tensor` is a view that boxing moved to another layout; -1 with a Python error set.
int is_moved(PyObject* tensor);

}  // namespace consistent::dispatch
