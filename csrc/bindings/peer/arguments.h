// Converts the arguments that Python passes to the methods of a Group to tensors, numbers and
// calls.

#pragma once

#include <ATen/ATen.h>
#include <Python.h>

#include <cstdint>
#include <vector>

#include "../../peer/group.h"

namespace consistent::peer {

using at::Tensor;
using Arguments = PyObject* const*;
using Sizes = std::vector<int64_t>;

void need(bool fact, const char* text);  // throws std::invalid_argument

Tensor tensor(PyObject* object);
// A CPU tensor in contiguous memory, with lazy conjugation and negation materialized; autograd does
// not record it.
Tensor plain(PyObject* object);
// Plain tensors of one dtype, at least one.
std::vector<Tensor> alike(PyObject* list);
// A plain tensor for each rank.
std::vector<Tensor> tensors(PyObject* list, const Group& group);
at::ScalarType dtype(PyObject* object);

int64_t integer(PyObject* object);
Sizes integers(PyObject* sequence);
// A size of 0 or more for each rank.
Sizes sizes_of(PyObject* object, const Group& group);
int64_t total(const Sizes& sizes);
// Throws if `sizes` do not add up to the size of the dim.
void need_cut(const Call& call, const Tensor& x, int dim, const Sizes& sizes);
// A dim of x; negative arguments count from the end.
int dim_of(PyObject* object, const Tensor& x);
Op op_of(PyObject* name);
// The index of a member of the group.
int source_of(PyObject* object, const Group& group);

// The type in which ranks combine the numbers of a tensor, and how many of that type an element
// has: a complex number is summed as two floats.
Type type_of(at::ScalarType type);
int pairs_of(at::ScalarType type);

// ---- the calls, as headers describe them --------------------------------------------------------

Call call_of(Kind kind, const Tensor& x, bool shaped = true);
Call call_all_reduce(const Tensor& x, Op op);
Call call_reduce_scatter(const Tensor& x, int dim, Op op);
Call call_all_gather(const Tensor& x, int dim);
Call call_all_to_all(const Tensor& x, int split, int dim);
// For several tensors of one dtype. `numbers` are what all ranks know of the shapes.
Call call_several(Kind kind, const std::vector<Tensor>& xs, const Sizes& numbers);
Call call_broadcast(const Tensor& x, int source, const Group& group);

}  // namespace consistent::peer
