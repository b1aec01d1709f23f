// Addends of gradients that wait for their sum, in the thread that runs backward.
//
//     LeafHook -> waiting -> bucket, when it is full or backward ends -> all-reduce -> .grad += sum

#pragma once

#include <ATen/core/Tensor.h>
#include <Python.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

namespace consistent::dispatch {

// The Python functions that the leaves' hooks call; set once.
struct Leaves {
  PyObject* watch = nullptr;    // (leaf)
  PyObject* assign = nullptr;   // (leaf, gradient): sets `.grad` as a user does
  PyObject* at_once = nullptr;  // () -> bytes from which a gradient is given to `take`
  PyObject* limit = nullptr;   // (bucket, whether one was launched) -> bytes that fill the next one
  PyObject* take = nullptr;    // (leaf, addend, whether it is unshared) -> gradient or None
  PyObject* launch = nullptr;  // (positions, leaves, flat)
  PyObject* send = nullptr;    // (positions) of what is held
  PyObject* settle = nullptr;  // (leaf, sum)
  PyObject* finish = nullptr;  // ()
  PyObject* shown = nullptr;   // (leaf) -> its gradient while an addend of it waits
};
extern Leaves leaves;

struct LeafHook;

struct Waiting {
  at::Tensor leaf, addend;
  int64_t bucket;
  int64_t number;         // its place in a bucket, alike on all ranks
  bool replaces;          // the addend includes what the leaf held
  bool held = false;      // Python sends it, and adds what comes of it
  bool sent = false;      // it is held no more, and not added yet
  bool launched = false;  // its bucket is on the way
  bool dropped = false;   // the user has set another gradient meanwhile
};

// The gradients that the backward of one thread has in flight.
class Backward {
 public:
  // The one of this thread.
  static Backward& current();

  // Before the first gradient of a graph task: reads `at_once`, and asks for `finish` at its end.
  void begin();
  // Puts the addend into the bucket of its leaf, which is launched when it is full.
  void add(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook, bool replaces);
  // Under the GIL: launches a large addend, which nobody else writes to, by itself and as it is.
  void add_alone(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook);
  // Under the GIL: lets an addend that Python adds itself (`take_back`) wait in a bucket, which
  // `launch_if_full` launches; or in none, for what is on the way already, if that is negative.
  // Returns its position.
  size_t hold(const at::Tensor& leaf, const at::Tensor& addend, int64_t bucket, int64_t nbytes);
  void launch_if_full(int64_t bucket);
  // The addend at `position` is on its way, and is not needed any more.
  void let_go(size_t position);
  // Its sum is there: whether it is still to be added.
  bool take_back(size_t position);
  // Under the GIL: passes what is not launched yet to Python, bucket by bucket.
  void launch_all();
  // Under the GIL: adds the sums of `positions`, which lie one after the other in `flat`, to the
  // leaves' gradients.
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
  // `as_it_is`: the only addend is sent from its own memory.
  void launch(const std::vector<size_t>& order, bool as_it_is = false);
  void settle(Waiting& each, const at::Tensor& part, bool alone);

  struct Bucket {
    int64_t nbytes = 0;  // bytes of the addends that are not launched
    int64_t limit = 0;   // bytes at which they are
    bool launched = false;
  };
  std::vector<Waiting> waiting_;
  std::vector<Bucket> buckets_;
  int task_ = -1;  // the graph task at whose end `finish` is called
  int64_t at_once_ = 0;
};

// Owns a new reference; if it is null, throws the Python error as an exception that torch knows.
THPObjectPtr checked(PyObject* made);
THPObjectPtr wrap(const at::Tensor& x);
// Throws as `checked` does if it is none.
int64_t integer_in(PyObject* number);

// Whether `x` may be overwritten.
bool nobody_else_holds(const at::Tensor& x);

}  // namespace consistent::dispatch
