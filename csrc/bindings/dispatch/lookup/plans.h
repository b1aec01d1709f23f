// Plans in the form that the hot path reads, and the table that finds them by key. All functions
// here run under the GIL.

#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>
#include <torch/csrc/utils/object_ptr.h>

#include <vector>

#include "key.h"

namespace consistent::dispatch {

// How a plan is run.
enum class Way : uint8_t {
  kRun,     // plan.run(args, kwargs, tensors), in Python
  kFast,    // one call of torch on the shards as they are
  kBoxed,   // the same, after plan.boxed(tensors) has boxed some of them
  kCall,    // `function` takes the call with its arguments unchanged
  kAnswer,  // the result is `constant`
  kFacts,   // no plan yet: the plan is found by a key that includes facts
};

// An output: its spec, or, in a plan that serves all sizes, its layout and the sources of its
// sizes.
struct Out {
  struct Source {
    int64_t dim;      // a split dim of the output
    int64_t operand;  // the operand that has the same size
    int64_t along;    // in this dim of the operand
    int64_t parts;    // the number of ranks that split the dim
  };

  mutable THPObjectPtr spec;  // mutable as in Function (functions.h)
  c10::ScalarType dtype{};    // the dtype of `spec`
  mutable THPObjectPtr layout;
  std::vector<Source> sources;
};

// The contents of a Python Plan, read once. An entry has a reference count of its own (hold, drop),
// since it must outlive its table while it runs.
struct Entry {
  // Set once, in of() or with(). Mutable as in Function (functions.h).
  mutable THPObjectPtr plan;
  mutable THPObjectPtr function;  // the function to call
  mutable THPObjectPtr sizes;     // local sizes, a tuple; null: the arguments stay unchanged
  mutable THPObjectPtr constant;
  std::vector<Out> outs;  // in a plan for all sizes the last one serves all further outputs
  Way way = Way::kRun;
  bool any_size = false, inplace = false, kept = true, by_value = false, by_grad = false;
  bool adopts = false;             // some tensors of the call are plain
  bool known_shapes = false;       // calls with equal keys give equal shapes, whatever the data
  bool is_copy = false;            // a copy, for one size, of a plan that serves all sizes
  mutable Entry* exact = nullptr;  // owned; in a copy: a plan for its sizes, which Python can run

  // A new entry with one reference; null with a Python error set.
  static Entry* of(PyObject* plan);
  // A copy of an entry for all sizes: it is for the sizes in `specs`, one spec per output.
  Entry* with(const std::vector<THPObjectPtr>& specs, PyObject* sizes) const;
  void hold() { ++references_; }
  void drop() {
    if (--references_ == 0) delete this;
  }

 private:
  // Not atomic: the GIL guards it.
  int64_t references_ = 1;
  ~Entry();
  explicit Entry(PyObject* plan);
  bool read(PyObject* plan);
  bool read_outs(PyObject* outs);
};

// A hash table of at most `most` plans. When it is full, a new plan replaces one that was not used
// lately (the clock algorithm: second chance).
class PlanTable {
 public:
  explicit PlanTable(size_t most) : most_(most) {}
  PlanTable(const PlanTable&) = delete;
  PlanTable& operator=(const PlanTable&) = delete;
  ~PlanTable() { clear(); }

  // The entry of `key`, borrowed, or null. `failed` is set if a comparison raised a Python error.
  Entry* find(const Key& key, bool* failed);
  // Inserts `entry` under `key`. The slot owns new references to the entry and to what `key`
  // borrows.
  void insert(const Key& key, Entry* entry);
  void clear();
  size_t size() const { return order_.size(); }
  size_t most() const { return most_; }
  std::vector<Entry*> entries() const;

 private:
  struct Slot {
    uint64_t hash;
    std::vector<Atom> atoms;
    std::vector<THPObjectPtr> objects, held;
    Entry* entry;        // owned: hold() and drop()
    bool asked = false;  // found since the clock's hand last passed
    Slot(const Key& key, Entry* entry);
    ~Slot();
  };
  enum class Same { kYes, kNo, kFailed, kChanged };
  Same same(Slot& slot, const Key& key) const;
  void place(Slot* slot);
  void grow();
  Slot* take_oldest();
  void remove(const Slot* slot);

  const size_t most_;
  std::vector<Slot*> slots_;  // open addressing: a power of two, at most half full; borrowed
  std::vector<Slot*> order_;  // the same slots in the order of the clock; owned
  size_t hand_ = 0;           // the clock's hand, an index in `order_`
  uint64_t sizes_met_ = 0;    // how many inserted entries were copies for one size
  // Changes whenever `slots_` changes. A comparison may run Python code that changes the table.
  uint64_t version_ = 0;
};

}  // namespace consistent::dispatch
