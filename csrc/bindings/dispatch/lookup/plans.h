// Plans, as the hot path reads them, and the table that finds them by key. All of it runs under the
// GIL.

#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <vector>

#include "key.h"

namespace consistent::dispatch {

// How a plan is run.
enum class Way : uint8_t {
  kRun,     // plan.run(args, kwargs, tensors), in Python
  kFast,    // one call of torch on the shards as they are
  kBoxed,   // the same, once plan.boxed(tensors) has boxed some of them
  kCall,    // a function takes the call with its arguments unchanged
  kAnswer,  // a constant
  kFacts,   // the plan is found by a key that includes facts
};

// The spec of an output, or its layout if the plan serves all sizes.
struct Out {
  struct Source {
    int64_t dim;      // a split dim of the output
    int64_t operand;  // the operand from which it has its size
    int64_t along;    // the dim of that operand
    int64_t parts;    // the number of ranks that split it
  };

  PyObject* spec = nullptr;
  c10::ScalarType dtype{};  // the dtype of `spec`
  PyObject* layout = nullptr;
  std::vector<Source> sources;
};

// The contents of a Python Plan, read once. Reference-counted, since an entry may outlive the table
// while it runs.
struct Entry {
  PyObject* plan;
  PyObject* function = nullptr;  // the function to call
  PyObject* sizes = nullptr;     // local sizes, a tuple; nullptr: the arguments stay unchanged
  PyObject* constant = nullptr;
  std::vector<Out> outs;  // in a plan for all sizes the last one serves all further outputs
  Way way = Way::kRun;
  bool any_size = false, inplace = false, kept = true, by_value = false, by_grad = false;
  bool adopts = false;             // some tensors of the call are plain
  bool known_shapes = false;       // equal keys give equal shapes, whatever the data
  bool is_copy = false;            // a copy, for some sizes, of a plan that serves all sizes
  mutable Entry* exact = nullptr;  // in a copy: a plan for its sizes only, which Python can run

  // A new entry with one reference; nullptr with a Python error set.
  static Entry* of(PyObject* plan);
  // A copy of a fast entry, for the sizes in `specs`.
  Entry* with(const std::vector<PyObject*>& specs, PyObject* sizes) const;
  void hold() { ++references_; }
  void drop() {
    if (--references_ == 0) delete this;
  }

 private:
  int64_t references_ = 1;
  ~Entry();
  explicit Entry(PyObject* plan);
  bool read(PyObject* plan);
  bool read_outs(PyObject* outs);
};

// A table of limited size; when it is full, a plan that was not used lately makes room for a new
// one.
class PlanTable {
 public:
  explicit PlanTable(size_t most) : most_(most) {}
  PlanTable(const PlanTable&) = delete;
  PlanTable& operator=(const PlanTable&) = delete;
  ~PlanTable() { clear(); }

  // The entry of `key`, borrowed, or nullptr; `failed` says that comparing raised.
  Entry* find(const Key& key, bool* failed);
  // Keeps `entry` under `key`, and what `key` borrows.
  void insert(const Key& key, Entry* entry);
  void clear();
  size_t size() const { return order_.size(); }
  size_t most() const { return most_; }
  std::vector<Entry*> entries() const;

 private:
  struct Slot {
    uint64_t hash;
    std::vector<Atom> atoms;
    std::vector<PyObject*> objects, held;
    Entry* entry;
    bool asked;  // used since the hand last passed
    ~Slot();
  };
  enum class Same { kYes, kNo, kFailed, kChanged };
  Same same(const Slot& slot, const Key& key) const;
  void place(Slot* slot);
  void grow();
  Slot* take_oldest();
  void remove(const Slot* slot);

  const size_t most_;
  std::vector<Slot*> slots_;  // open addressing, a power of two, at most half full
  std::vector<Slot*> order_;  // the same in the order of a clock, whose hand finds one to drop
  size_t hand_ = 0;
  uint64_t sizes_met_ = 0;  // how many entries were for one size of a plan for all
  uint64_t version_ = 0;  // changes with slots_: a comparison may run Python code that changes them
};

}  // namespace consistent::dispatch
