// Fast access to the Python objects TensorSpec and Layout: both have __slots__, which are read at
// their fixed offsets.

#pragma once

#include <Python.h>
#include <c10/util/ArrayRef.h>
#include <c10/util/SmallVector.h>

#include <cstdint>

namespace consistent::dispatch {

using Sizes = c10::SmallVector<int64_t, 8>;

// Looks up the offsets of the classes' slots; false with a Python error set.
bool set_spec_classes(PyObject* tensor_spec, PyObject* layout);

// Whether the object is a TensorSpec. The functions below read slots unchecked, and a file or a
// user's code can set any object as a tensor's `_spec`.
bool is_spec(PyObject* object);

// The attributes of a TensorSpec, borrowed.
PyObject* layout_of(PyObject* spec);
PyObject* shape_of(PyObject* spec);
PyObject* dtype_of(PyObject* spec);
// Whether every rank has the whole tensor.
bool is_whole(PyObject* layout);
// The number of pieces of each dim, up to the last dim that is split: a tuple, borrowed.
PyObject* parts_of(PyObject* layout);

// The sizes of a tuple of ints.
Sizes sizes_of(PyObject* shape);

// The interned spec of layout, sizes and dtype: a new reference; null with a Python error set.
PyObject* make_spec(PyObject* layout, c10::ArrayRef<int64_t> sizes, PyObject* dtype);

}  // namespace consistent::dispatch
