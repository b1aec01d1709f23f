// Where torch reads a number out of a tensor (torch.full((2,), x), alpha=x, torch.tensor([x, y])),
// it asks no hook and would read this rank's shard.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (read): from now on torch gets the number in a global tensor from read(tensor).
PyObject* read_numbers_by(PyObject*, PyObject* read);

// (now): whether this thread runs backward over global tensors; gives what held before. There the
// search for NaN in anomaly mode does not end it: `take_nan_found` gives what it found.
PyObject* in_backward_of_shards(PyObject*, PyObject* now);

// () -> what anomaly mode says of the first NaN since it was asked last; "" if there was none.
PyObject* take_nan_found(PyObject*, PyObject*);

// (instead): collectives of torch.distributed raise for global tensors, and say what to call.
PyObject* refuse_collectives(PyObject*, PyObject* instead);

}  // namespace consistent::dispatch
