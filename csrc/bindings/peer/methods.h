// The methods of a Group, and the other parts of the module.

#pragma once

#include <memory>

#include "arguments.h"

namespace consistent::peer {

// A new CPU tensor; a large one asks for huge pages.
Tensor empty(at::IntArrayRef shape, at::ScalarType type);
// The parts of contiguous `x`, split by `sizes` along `dim`.
std::vector<Rows> parts(const Tensor& x, int dim, const Sizes& sizes);

// The moves; moves.cpp describes each.
PyObject* all_reduce(Group& group, Arguments arguments);
PyObject* reduce_scatter(Group& group, Arguments arguments);
PyObject* all_gather(Group& group, Arguments arguments);
PyObject* all_to_all(Group& group, Arguments arguments);
PyObject* reduce_scatter_several(Group& group, Arguments arguments);  // several.cpp
PyObject* all_gather_several(Group& group, Arguments arguments);
PyObject* gather_into(Group& group, Arguments arguments);
PyObject* all_to_all_into(Group& group, Arguments arguments);
PyObject* broadcast(Group& group, Arguments arguments);
PyObject* gather_objects(Group& group, Arguments arguments);
PyObject* stage(Group& group, Arguments arguments);
PyObject* unstage(Group& group, Arguments arguments);
PyObject* refuse(Group& group, Arguments arguments);
PyObject* unlink(Group& group, Arguments arguments);
PyObject* room(Group& group, Arguments arguments);
PyObject* grow(Group& group, Arguments arguments);
PyObject* shrink(Group& group, Arguments arguments);
PyObject* set_one_shot(Group& group, Arguments arguments);

// These exchange only the headers of the move of the same name, for tensors on any device that
// another transport moves. So calls that do not match raise on all ranks before data is moved.
// meet.cpp
PyObject* meet_all_reduce(Group& group, Arguments arguments);      // (x, op)
PyObject* meet_reduce_scatter(Group& group, Arguments arguments);  // (x, dim, sizes, op)
PyObject* meet_all_gather(Group& group, Arguments arguments);      // (x, dim, sizes)
PyObject* meet_all_to_all(Group& group, Arguments arguments);  // (x, split, sizes, concat, sizes)
PyObject* meet_broadcast(Group& group, Arguments arguments);   // (x, shape, dtype, source)
PyObject* meet_peers(Group& group, Arguments arguments);       // (x)

// waiting() -> (seconds, thread, call, steps of all members) of the thread that sleeps in a call,
// or None.
PyObject* waiting(Group& group, Arguments arguments);

// Adds the type Alarm to the module; the Alarm of a Python object of that type. alarm.cpp
bool add_alarm(PyObject* module);
std::shared_ptr<Alarm> alarm_of(PyObject* object);

// Adds the types Sockets and Message. sockets.cpp
void add_sockets(PyObject* module);

// Adds collect() and reduce(), which a GPU runs on its peers' memory. device.cpp
void add_device_moves(PyObject* module);

}  // namespace consistent::peer
