// What dispatch knows about a function of torch, independent of its arguments. It is read from
// Python once per function.

#pragma once

#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <cstdint>

namespace consistent::dispatch {

// How sizes among the arguments are converted to local sizes without planning; see sizes.h.
enum class Sizing : uint8_t { kNone, kView, kExpand };

// The contents of a Python TorchFunction, read once. It has a reference count of its own (hold,
// drop), since a function in use may outlive its place in the table.
struct Function {
  // Set once, in of(). Mutable, because a const THPObjectPtr gives only a const PyObject*, which no
  // function of Python takes.
  mutable THPObjectPtr resolved;    // the TorchFunction
  mutable THPObjectPtr call;        // takes every call with its arguments unchanged; may be null
  mutable THPObjectPtr free_names;  // of arguments whose integers do not affect layouts, a tuple
  uint32_t free = 0;  // the same by position; bit 31 stands for position 31 and all later ones
  Sizing sizing = Sizing::kNone;

  static Function* of(PyObject* resolved);
  bool is_free(Py_ssize_t position) const {
    return (free >> (position < 31 ? position : 31) & 1u) != 0;
  }
  bool is_free(PyObject* name) const;
  void hold() { ++references_; }
  void drop() {
    if (--references_ == 0) delete this;
  }

 private:
  // Not atomic: the GIL guards it.
  int64_t references_ = 1;
  explicit Function(PyObject* resolved);
  ~Function() = default;
};

// A new reference to the entry of `function`; null with a Python error set. The entry is remembered
// if `lasting`: the function object then stays alive, so its address identifies it.
Function* function_of(PyObject* function, bool lasting);

// Forgets all entries.
void clear_functions();

}  // namespace consistent::dispatch
