// Addends of gradients that wait to be summed over the ranks, in the thread that runs backward.
//
//     LeafHook -> waiting -> bucket, when it is full or backward ends -> all-reduce -> .grad += sum

#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

namespace consistent::dispatch {

// The Python functions that the leaves' hooks call. Set once and never released.
struct Leaves {
  PyObject* watch = nullptr;    // (leaf)
  PyObject* assign = nullptr;   // (leaf, gradient): sets `.grad` as a user does
  PyObject* at_once = nullptr;  // () -> bytes from which on a gradient is passed to `take`
  PyObject* limit = nullptr;   // (bucket, whether one was launched) -> bytes that fill the next one
  PyObject* take = nullptr;    // (leaf, addend, whether nobody else holds it) -> gradient or None
  PyObject* launch = nullptr;  // (positions, leaves, flat): starts the all-reduce of `flat`
  PyObject* send = nullptr;    // (positions): sends addends that are `held`
  PyObject* settle = nullptr;  // (leaf, sum): makes the sum the gradient
  PyObject* finish = nullptr;  // (): called at the end of backward
  PyObject* shown = nullptr;   // (leaf) -> its gradient while an addend of it waits
};
extern Leaves leaves;

struct LeafHook;

struct Waiting {
  at::Tensor leaf, addend;
  int64_t bucket;
  int64_t number;         // its order in the bucket, the same on all ranks
  bool replaces;          // the addend includes the previous `.grad`, so the sum replaces that
  bool held = false;      // Python sends the addend, and adds the result
  bool sent = false;      // it was `held` and is sent; the result is not added yet
  bool launched = false;  // the all-reduce of its bucket was started
  bool dropped = false;   // the user has set another gradient since: the sum is not added
};

// The gradients in flight of the backward in one thread.
class Backward {
 public:
  // The object of this thread.
  static Backward& current();

  // Called before each gradient. In the first call of a graph task it reads `at_once` and registers
  // `finish` as a callback for the end of the task.
  void begin();
  // Puts the addend into the bucket of its leaf, and launches the bucket if it is full.
  void add(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook, bool replaces);
  // Needs the GIL. Launches a large addend alone, from its own memory, which nobody else writes to.
  void add_alone(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook);
  // Needs the GIL. Adds an addend that Python itself sends and adds (`held`), and returns its
  // position. It waits in `bucket` until launch_if_full(); if `bucket` is negative, it is already
  // on its way and waits in none.
  size_t hold(const at::Tensor& leaf, const at::Tensor& addend, int64_t bucket, int64_t nbytes);
  void launch_if_full(int64_t bucket);
  // The addend at `position` is on its way: releases its memory.
  void let_go(size_t position);
  // The sum of the addend at `position` has arrived. Returns whether it is still to be added.
  bool take_back(size_t position);
  // Needs the GIL. Launches all buckets with addends that are not launched yet.
  void launch_all();
  // Needs the GIL. Adds the sums of the addends at `positions`, which lie one after the other in
  // `flat`, to the leaves' gradients.
  void accumulate(const std::vector<size_t>& positions, const at::Tensor& flat);
  void clear();

  // The addends that wait for `leaf`.
  std::vector<Waiting*> of(const at::Tensor& leaf);
  size_t position(const Waiting& each) const { return &each - waiting_.data(); }
  void drop(const at::Tensor& leaf);
  bool any() const { return !waiting_.empty(); }
  int64_t at_once() const { return at_once_; }

  bool sync = true;  // false inside no_sync()

 private:
  void put(Waiting each, int64_t nbytes);
  void launch(int64_t bucket);
  // `as_it_is`: `order` has one addend, which is sent from its own memory and not copied.
  void launch(const std::vector<size_t>& order, bool as_it_is = false);
  void settle(Waiting& each, const at::Tensor& part, bool alone);

  struct Bucket {
    int64_t nbytes = 0;  // bytes of the addends that are not launched
    int64_t limit = 0;   // bytes at which the bucket is launched
    bool launched = false;
  };
  std::vector<Waiting> waiting_;
  std::vector<Bucket> buckets_;
  int task_ = -1;  // the graph task for which begin() was called, or -1
  int64_t at_once_ = 0;
};

// Takes over the new reference `made`. If it is null, throws the Python error as torch's
// python_error, which the autograd engine passes on from its threads.
THPObjectPtr checked(PyObject* made);
// The Python object of a tensor.
THPObjectPtr wrap(const at::Tensor& x);
// The value of a Python int; throws as checked() does if `number` is not an int.
int64_t integer_in(PyObject* number);

// Whether nobody else holds `x` or its storage, so that it may be overwritten.
bool nobody_else_holds(const at::Tensor& x);

}  // namespace consistent::dispatch
