// TensorSpec and Layout as the hot path reads them: Python objects whose slots are at fixed
// offsets.

#pragma once

#include <Python.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace consistent::dispatch {

using Sizes = c10::SmallVector<int64_t, 8>;

// Finds the offsets of the classes' slots; false with a Python error set.
bool set_spec_classes(PyObject* tensor_spec, PyObject* layout);

// Whether the object is a TensorSpec, whose slots may be read. Files and users' code can set any
// object as a tensor's `_spec`.
bool is_spec(PyObject* object);

// The attributes of a TensorSpec, borrowed.
PyObject* layout_of(PyObject* spec);
PyObject* shape_of(PyObject* spec);
PyObject* dtype_of(PyObject* spec);
// Whether every rank has the whole tensor.
bool is_whole(PyObject* layout);
// A tuple: into how many pieces the layout cuts each dim, up to the last that is split; borrowed.
PyObject* parts_of(PyObject* layout);

// The sizes of a tuple of ints.
Sizes sizes_of(PyObject* shape);

// The interned spec, a new reference; nullptr with a Python error set.
PyObject* make_spec(PyObject* layout, c10::ArrayRef<int64_t> sizes, PyObject* dtype);

}  // namespace consistent::dispatch
