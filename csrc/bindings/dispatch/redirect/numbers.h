// Redirects torch's reads of a number from a tensor, as in torch.full((2,), x), alpha=x or
// torch.tensor([x, y]). torch calls no hook there and would read this rank's shard.

#pragma once

#include <Python.h>

namespace consistent::dispatch {

// (read): from now on, torch gets the number in a global tensor from read(tensor).
PyObject* read_numbers_by(PyObject*, PyObject* read);

// (now): sets whether this thread runs backward over global tensors; returns the previous value. In
// such a backward, a NaN found by anomaly mode does not end the pass on this rank alone:
// take_nan_found() returns what was found.
PyObject* in_backward_of_shards(PyObject*, PyObject* now);

// () -> anomaly mode's message for the first NaN since the last call; "" if there was none.
PyObject* take_nan_found(PyObject*, PyObject*);

// (instead): from now on, collectives of torch.distributed raise for global tensors. The message
// says to call `instead`.
PyObject* refuse_collectives(PyObject*, PyObject* instead);

}  // namespace consistent::dispatch
