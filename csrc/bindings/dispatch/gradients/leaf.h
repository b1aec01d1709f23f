// What happens when a gradient reaches a leaf that other ranks hold too.
//
// Autograd computes this rank's addend of the gradient. A tensor hook, the last one before torch
// would add it to `.grad`, takes it away: it waits until its bucket is full or backward ends, is
// summed with those of other ranks, and only then added, by torch's own code. So `.grad` only ever
// holds whole gradients, and code that keeps one never sees it turn into an addend. Less simple
// cases go to Python (consistent/autograd/leaves.py), which gives the engine a gradient in the
// layout of
// `.grad`.

#pragma once

#include <Python.h>
#include <torch/csrc/autograd/function_hook.h>
#include <torch/csrc/autograd/variable.h>

#include "waiting.h"

namespace consistent::dispatch {

struct LeafHook : torch::autograd::FunctionPreHook {
  LeafHook(c10::TensorImpl* leaf, int64_t bucket, int64_t nbytes, int64_t number)
      : bucket(bucket), nbytes(nbytes), number(number), leaf_(leaf) {}
  torch::autograd::variable_list operator()(const torch::autograd::variable_list& grads) override;

  // The hook of `leaf`; nullptr if it has none.
  static LeafHook* of(const at::Tensor& leaf);
  // Gives `leaf` a hook that runs after the hooks of users.
  static void enter(const at::Tensor& leaf, int64_t bucket, int64_t nbytes);
  static void remove(const at::Tensor& leaf);

  int64_t bucket;        // one for leaves summed over the same ranks; -1 outside the placement
  int64_t nbytes;        // bytes of the largest piece, so that all ranks count the same
  int64_t number;        // leaves of one bucket are in the same order by it on all ranks
  bool partial = false;  // whether a gradient that has no spec yet is an addend

 private:
  bool is_simple(const at::Tensor& leaf, const at::Tensor& grad, const Backward& run) const;
  bool lies_as_wanted(const at::Tensor& leaf, bool sync) const;

  c10::TensorImpl* leaf_;  // owns the hook
};

// The gradient of a global tensor as a global tensor, or None: gradient() includes addends that
// wait for their sum, held_gradient() leaves them out. A new reference.
PyObject* gradient(PyObject* leaf);
PyObject* held_gradient(PyObject* leaf);

// Called with each tensor that has just become global: one that requires grad gets a hook.
bool watch_if_leaf(PyObject* tensor);

// Adds these functions to the module, for Python.
bool add_leaf_functions(PyObject* module);

}  // namespace consistent::dispatch
