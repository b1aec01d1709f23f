// Plans, as the hot path reads them, and the table that finds them by key. All under the GIL.

#pragma once

#include <Python.h>
#include <c10/core/ScalarType.h>

#include <vector>

#include "key.h"

namespace consistent::dispatch {

// What a Python Plan says, read once. Counted by hand: entries outlive the table while they run.
struct Entry {
  PyObject* plan;
  PyObject* run;
  PyObject* sizes;              // a tuple, or nullptr: the arguments as they came
  PyObject* constant;           // the answer to a question about shapes or dtypes, or nullptr
  std::vector<PyObject*> outs;  // specs
  std::vector<c10::ScalarType> dtypes;
  bool fast, inplace, kept, as_called;

  // A new entry with one reference; nullptr with a Python error set.
  static Entry* of(PyObject* plan);
  void hold() { ++references_; }
  void drop();

 private:
  int64_t references_ = 1;
  ~Entry();
  explicit Entry(PyObject* plan);
};

class PlanTable {
 public:
  PlanTable() = default;
  PlanTable(const PlanTable&) = delete;
  PlanTable& operator=(const PlanTable&) = delete;
  ~PlanTable() { clear(); }

  // The entry of `key`, borrowed, or nullptr; `failed` says that comparing raised.
  Entry* find(const Key& key, bool* failed);
  // Keeps `entry` under `key`, and what `key` borrows.
  void insert(const Key& key, Entry* entry);
  void clear();
  size_t size() const { return count_; }
  std::vector<Entry*> entries() const;

 private:
  struct Slot {
    uint64_t hash;
    std::vector<Atom> atoms;
    std::vector<PyObject*> objects, specs;
    Entry* entry;
    ~Slot();
  };
  enum class Same { kYes, kNo, kFailed, kChanged };
  Same same(const Slot& slot, const Key& key) const;
  void grow();

  std::vector<Slot*> slots_;  // open addressing, a power of two, at most half full
  size_t count_ = 0;
  uint64_t version_ = 0;  // of slots_: comparing may run Python code, which may change them
};

}  // namespace consistent::dispatch
