// The tensor hook of a leaf that other ranks hold too.
//
// Autograd computes this rank's addend of the gradient. The hook, the last one before torch would
// add the addend to `.grad`, takes it away. The addend waits until its bucket is full or backward
// ends, is summed with the addends of the other ranks, and only the sum is added to `.grad`, by
// torch's own code. So `.grad` always holds a whole gradient, and code that keeps a reference to it
// never sees an addend. Less simple cases go to Python (consistent/autograd/leaves.py), which
// returns a gradient in the layout of `.grad` to the engine.

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

  int64_t bucket;        // shared by leaves summed over the same ranks; -1 outside the placement
  int64_t nbytes;        // bytes of the largest rank's piece, so that all ranks count the same
  int64_t number;        // orders the leaves of a bucket in the same way on all ranks
  bool partial = false;  // whether a `.grad` without a spec is an addend (from no_sync())

 private:
  bool is_simple(const at::Tensor& leaf, const at::Tensor& grad, const Backward& run) const;
  bool lies_as_wanted(const at::Tensor& leaf, bool sync) const;

  c10::TensorImpl* leaf_;  // borrowed: the leaf owns this hook
};

// The gradient of a global tensor, as a global tensor or None, a new reference. gradient() includes
// addends that wait for their sum, held_gradient() does not.
PyObject* gradient(PyObject* leaf);
PyObject* held_gradient(PyObject* leaf);

// Called with each tensor that has just become global: if it requires grad, it gets a hook. False
// with a Python error set.
bool watch_if_leaf(PyObject* tensor);

// Adds these functions to the module, for Python.
bool add_leaf_functions(PyObject* module);

}  // namespace consistent::dispatch
