// The methods of a Group, and what else the module has.

#pragma once

#include "arguments.h"

namespace consistent::peer {

// Moves, as moves.cpp says of each.
PyObject* all_reduce(Group& group, Arguments arguments);
PyObject* reduce_scatter(Group& group, Arguments arguments);
PyObject* all_gather(Group& group, Arguments arguments);
PyObject* all_to_all(Group& group, Arguments arguments);
PyObject* gather_into(Group& group, Arguments arguments);
PyObject* trade_into(Group& group, Arguments arguments);
PyObject* broadcast(Group& group, Arguments arguments);
PyObject* gather_objects(Group& group, Arguments arguments);
PyObject* stage(Group& group, Arguments arguments);
PyObject* unstage(Group& group, Arguments arguments);
PyObject* unlink(Group& group, Arguments arguments);
PyObject* room(Group& group, Arguments arguments);
PyObject* grow(Group& group, Arguments arguments);
PyObject* shrink(Group& group, Arguments arguments);
PyObject* set_one_shot(Group& group, Arguments arguments);

// The headers of the moves of the same names, for tensors that go another way, on any device: who
// calls what does not fit is told here, by all, before anything moves. meet.cpp
PyObject* meet_all_reduce(Group& group, Arguments arguments);      // (x, op)
PyObject* meet_reduce_scatter(Group& group, Arguments arguments);  // (x, dim, sizes, op)
PyObject* meet_all_gather(Group& group, Arguments arguments);      // (x, dim, sizes)
PyObject* meet_all_to_all(Group& group, Arguments arguments);  // (x, split, sizes, concat, sizes)
PyObject* meet_broadcast(Group& group, Arguments arguments);   // (x, shape, dtype, source)
PyObject* meet_peers(Group& group, Arguments arguments);       // (x)

// collect() and reduce(), what a GPU does with its peers' memory. device.cpp
void add_device_moves(PyObject* module);

}  // namespace consistent::peer
