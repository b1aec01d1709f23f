// The sizes of an op's outputs, for plans that serve all sizes, and the sizes among its arguments.

#pragma once

#include <Python.h>

#include "functions.h"
#include "key.h"
#include "plans.h"
#include "spec.h"

namespace consistent::dispatch {

// The sizes with which view, expand and similar ops are called: logical ones, and this rank's.
struct SizeArguments {
  Sizes whole, local;
  bool in_sequence = false;  // they came as one tuple or list
};

// Reads them from a call whose only output has the layout of `out`. False if the splits would
// differ from the planned ones, or if the sizes are not positional arguments.
bool read_sizes(Sizing sizing, const Out& out, const Key& key, const Arguments& given,
                SizeArguments* sizes);

// The arguments after the tensor in the call on the shard: the local sizes, in the form in which
// the logical ones were given. A tuple, or nullptr with a Python error set.
PyObject* local_arguments(const SizeArguments& sizes);

// The spec of `tensor`, a local output with the layout of `out`; a new reference, or nullptr with a
// Python error set. `whole` are its logical sizes where they are known already, else nullptr.
PyObject* spec_of_output(PyObject* tensor, const Out& out, const Key& key, const Sizes* whole);

}  // namespace consistent::dispatch
