// What dispatch knows about a function of torch, whatever its arguments. Python is asked once.

#pragma once

#include <Python.h>

#include <cstdint>

namespace consistent::dispatch {

// Which sizes among the arguments are made local without planning; see sizes.h.
enum class Sizing : uint8_t { kNone, kView, kExpand };

// The contents of Python's TorchFunction, read once. Reference-counted, since entries may outlive
// the table.
struct Function {
  PyObject* resolved;    // the TorchFunction
  PyObject* call;        // takes every call with its arguments unchanged, or nullptr
  PyObject* free_names;  // names of arguments whose integers do not affect layouts, a tuple
  uint32_t free = 0;     // the same by position; bit 31 stands for all positions from there on
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
  int64_t references_ = 1;
  explicit Function(PyObject* resolved);
  ~Function();
};

// A new reference to the entry of `function`, which is remembered if it is `lasting`; nullptr with
// a Python error set.
Function* function_of(PyObject* function, bool lasting);

// Forgets all entries.
void clear_functions();

}  // namespace consistent::dispatch
