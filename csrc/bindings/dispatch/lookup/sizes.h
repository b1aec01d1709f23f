// For plans that serve all sizes: the sizes of an op's outputs, and the sizes among its arguments.

#pragma once

#include <Python.h>

#include "functions.h"
#include "key.h"
#include "plans.h"
#include "spec.h"

namespace consistent::dispatch {

// The sizes with which view, expand and similar ops are called: the logical ones (`whole`) and
// those of this rank (`local`).
struct SizeArguments {
  Sizes whole, local;
  bool in_sequence = false;  // they came as one tuple or list
};

// Reads the sizes from a call whose only output has the layout of `out`. False, without a Python
// error, if the output would be split differently from the plan, or if the sizes are not positional
// arguments.
bool read_sizes(Sizing sizing, const Out& out, const Key& key, const Arguments& given,
                SizeArguments* sizes);

// The arguments after the tensor in the call on the shard: the local sizes, in the form (one by
// one, or one sequence) in which the logical sizes were given. A new tuple; null with a Python
// error set.
PyObject* local_arguments(const SizeArguments& sizes);

// The spec of `tensor`, a local output with the layout of `out`: a new reference; null with a
// Python error set. `whole` are the logical sizes if they are already known, else null.
PyObject* spec_of_output(PyObject* tensor, const Out& out, const Key& key, const Sizes* whole);

}  // namespace consistent::dispatch
