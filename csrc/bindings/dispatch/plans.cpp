#include "plans.h"

#include <torch/csrc/Dtype.h>

#include <cstring>

namespace consistent::dispatch {
namespace {

// Whether plan.<name> is true; false with a Python error set.
bool truth(PyObject* plan, const char* name, bool* value) {
  PyObject* found = PyObject_GetAttrString(plan, name);
  if (found == nullptr) return false;
  const int is = PyObject_IsTrue(found);
  Py_DECREF(found);
  *value = is == 1;
  return is >= 0;
}

}  // namespace

Entry::Entry(PyObject* plan_) : plan(plan_), run(nullptr), sizes(nullptr), constant(nullptr) {
  Py_INCREF(plan);
}

Entry::~Entry() {
  Py_XDECREF(run);
  Py_XDECREF(sizes);
  Py_XDECREF(constant);
  for (PyObject* spec : outs) Py_DECREF(spec);
  Py_DECREF(plan);
}

void Entry::drop() {
  if (--references_ == 0) delete this;
}

Entry* Entry::of(PyObject* plan) {
  auto* entry = new Entry(plan);
  PyObject* outs = nullptr;
  bool settled = false;
  bool read = truth(plan, "settled", &settled) && truth(plan, "fast", &entry->fast) &&
              truth(plan, "inplace", &entry->inplace) && truth(plan, "kept", &entry->kept) &&
              truth(plan, "as_called", &entry->as_called) &&
              (entry->run = PyObject_GetAttrString(plan, "run")) != nullptr &&
              (entry->sizes = PyObject_GetAttrString(plan, "sizes")) != nullptr &&
              (outs = PyObject_GetAttrString(plan, "outs")) != nullptr;
  if (read && entry->sizes == Py_None) Py_CLEAR(entry->sizes);
  if (read && settled)
    read = (entry->constant = PyObject_GetAttrString(plan, "constant")) != nullptr;
  for (Py_ssize_t i = 0; read && i < PyTuple_GET_SIZE(outs); ++i) {
    PyObject* spec = PyTuple_GET_ITEM(outs, i);
    PyObject* dtype = PyObject_GetAttrString(spec, "dtype");
    read = dtype != nullptr && THPDtype_Check(dtype);
    if (read) {
      Py_INCREF(spec);
      entry->outs.push_back(spec);
      entry->dtypes.push_back(reinterpret_cast<THPDtype*>(dtype)->scalar_type);
    }
    Py_XDECREF(dtype);
  }
  Py_XDECREF(outs);
  if (read) return entry;
  entry->drop();
  return nullptr;
}

PlanTable::Slot::~Slot() {
  for (PyObject* object : objects) Py_DECREF(object);
  for (PyObject* spec : specs) Py_DECREF(spec);
  entry->drop();
}

PlanTable::Same PlanTable::same(const Slot& slot, const Key& key) const {
  if (slot.hash != key.hash || slot.atoms.size() != key.atoms.size() ||
      slot.objects.size() != key.objects.size() ||
      std::memcmp(slot.atoms.data(), key.atoms.data(), slot.atoms.size() * sizeof(Atom)) != 0) {
    return Same::kNo;
  }
  const uint64_t version = version_;
  for (size_t i = 0; i < key.objects.size(); ++i) {
    if (slot.objects[i] == key.objects[i]) continue;
    PyObject *mine = slot.objects[i], *given = key.objects[i];
    Py_INCREF(mine);  // the table may change under the comparison
    const int equal = PyObject_RichCompareBool(mine, given, Py_EQ);
    Py_DECREF(mine);
    if (equal < 0) return Same::kFailed;
    if (version != version_) return Same::kChanged;  // `slot` may be gone
    if (equal == 0) return Same::kNo;
  }
  return Same::kYes;
}

Entry* PlanTable::find(const Key& key, bool* failed) {
  *failed = false;
  if (count_ == 0) return nullptr;
  const size_t mask = slots_.size() - 1;
  for (size_t at = key.hash & mask;; at = (at + 1) & mask) {
    Slot* slot = slots_[at];
    if (slot == nullptr) return nullptr;
    if (slot->hash != key.hash) continue;
    const Same found = same(*slot, key);
    if (found == Same::kFailed) {
      *failed = true;
      return nullptr;
    }
    if (found == Same::kChanged) return find(key, failed);
    if (found == Same::kYes) return slot->entry;
  }
}

void PlanTable::insert(const Key& key, Entry* entry) {
  if (slots_.size() < 2 * (count_ + 1)) grow();
  auto* slot = new Slot{key.hash,
                        {key.atoms.begin(), key.atoms.end()},
                        {key.objects.begin(), key.objects.end()},
                        {key.specs.begin(), key.specs.end()},
                        entry};
  for (PyObject* object : slot->objects) Py_INCREF(object);
  for (PyObject* spec : slot->specs) Py_INCREF(spec);
  entry->hold();
  const size_t mask = slots_.size() - 1;
  size_t at = key.hash & mask;
  while (slots_[at] != nullptr) at = (at + 1) & mask;
  slots_[at] = slot;
  ++count_;
  ++version_;
}

void PlanTable::grow() {
  std::vector<Slot*> before(slots_.empty() ? 256 : 2 * slots_.size(), nullptr);
  before.swap(slots_);
  const size_t mask = slots_.size() - 1;
  for (Slot* slot : before) {
    if (slot == nullptr) continue;
    size_t at = slot->hash & mask;
    while (slots_[at] != nullptr) at = (at + 1) & mask;
    slots_[at] = slot;
  }
  ++version_;
}

void PlanTable::clear() {
  std::vector<Slot*> before;
  before.swap(slots_);  // letting go may run Python code, which finds the table empty
  count_ = 0;
  ++version_;
  for (Slot* slot : before) delete slot;
}

std::vector<Entry*> PlanTable::entries() const {
  std::vector<Entry*> found;
  for (Slot* slot : slots_) {
    if (slot != nullptr) found.push_back(slot->entry);
  }
  return found;
}

}  // namespace consistent::dispatch
