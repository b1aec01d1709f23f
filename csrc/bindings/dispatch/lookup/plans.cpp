#include "plans.h"

#ifdef __GLIBC__
#include <malloc.h>
#endif
#include <torch/csrc/Dtype.h>

#include <cstring>

#include "read.h"
#include "spec.h"

namespace consistent::dispatch {
namespace {

constexpr uint64_t kSizesBetween = 512;  // copies inserted between two calls of give_back_holes()

bool read_scalar_type(PyObject* spec, c10::ScalarType* type) {
  PyObject* dtype = dtype_of(spec);
  if (!THPDtype_Check(dtype)) {
    PyErr_Format(PyExc_TypeError, "%R has no dtype", spec);
    return false;
  }
  *type = reinterpret_cast<THPDtype*>(dtype)->scalar_type;
  return true;
}

// Reads (layout, ((dim, operand, along, parts), ...)).
bool read_rule(PyObject* rule, Out* out) {
  PyObject *layout = nullptr, *sources = nullptr;  // borrowed
  if (!PyArg_ParseTuple(rule, "OO!", &layout, &PyTuple_Type, &sources)) return false;
  out->layout = Py_NewRef(layout);
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(sources); ++i) {
    long long dim = 0, operand = 0, along = 0, parts = 0;
    if (!PyArg_ParseTuple(PyTuple_GET_ITEM(sources, i), "LLLL", &dim, &operand, &along, &parts)) {
      return false;
    }
    out->sources.push_back({dim, operand, along, parts});
  }
  return true;
}

// Returns freed memory between live blocks to the system. Sizes that grow with each call leave such
// holes: the entry of a size is allocated after its tensors, and once these are freed, the larger
// tensors of the next size do not fit in the hole. Without this, a cache of 0.5 MB that grows for
// 4,000 steps takes 350 MB.
void give_back_holes() {
#ifdef __GLIBC__
  malloc_trim(0);
#endif
}

}  // namespace

Entry::Entry(PyObject* plan_) : plan(Py_NewRef(plan_)) {}

Entry::~Entry() {
  if (exact != nullptr) exact->drop();
}

bool Entry::read_outs(PyObject* given) {
  for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(given); ++i) {
    PyObject* out = PyTuple_GET_ITEM(given, i);
    outs.emplace_back();
    if (any_size) {
      if (!read_rule(out, &outs.back())) return false;
    } else {
      outs.back().spec = Py_NewRef(out);
      if (!read_scalar_type(out, &outs.back().dtype)) return false;
    }
  }
  return true;
}

bool Entry::read(PyObject* from) {
  int64_t number = 0;
  THPObjectPtr given;
  const bool done =
      read_int(from, "way", &number) && read_bool(from, "any_size", &any_size) &&
      read_bool(from, "inplace", &inplace) && read_bool(from, "kept", &kept) &&
      read_bool(from, "by_value", &by_value) && read_bool(from, "by_grad", &by_grad) &&
      read_bool(from, "known_shapes", &known_shapes) && read_bool(from, "adopts", &adopts) &&
      read_object(from, "function", &function) && read_object(from, "sizes", &sizes) &&
      read_object(from, "constant", &constant) && read_object(from, "outs", &given) &&
      read_outs(given.get());
  way = static_cast<Way>(number);
  if (done && sizes.get() == Py_None) sizes = nullptr;
  return done;
}

Entry* Entry::of(PyObject* plan) {
  auto* entry = new Entry(plan);
  if (entry->read(plan)) return entry;
  entry->drop();
  return nullptr;
}

Entry* Entry::with(const std::vector<THPObjectPtr>& specs, PyObject* local_sizes) const {
  auto* made = new Entry(plan.get());
  made->function = function.dup();
  made->sizes = Py_XNewRef(local_sizes);
  made->way = way;
  made->inplace = inplace;
  made->adopts = adopts;
  made->is_copy = true;
  for (const THPObjectPtr& spec : specs) {
    Out& out = made->outs.emplace_back();
    out.spec = spec.dup();
    out.dtype = reinterpret_cast<THPDtype*>(dtype_of(out.spec.get()))->scalar_type;
  }
  return made;
}

PlanTable::Slot::Slot(const Key& key, Entry* entry_)
    : hash(key.hash), atoms(key.atoms.begin(), key.atoms.end()), entry(entry_) {
  for (PyObject* object : key.objects) objects.emplace_back(Py_NewRef(object));
  for (PyObject* object : key.held) held.emplace_back(Py_NewRef(object));
  entry->hold();
}

PlanTable::Slot::~Slot() { entry->drop(); }

PlanTable::Same PlanTable::same(Slot& slot, const Key& key) const {
  if (slot.hash != key.hash || slot.atoms.size() != key.atoms.size() ||
      slot.objects.size() != key.objects.size() ||
      std::memcmp(slot.atoms.data(), key.atoms.data(), slot.atoms.size() * sizeof(Atom)) != 0) {
    return Same::kNo;
  }
  const uint64_t version = version_;
  for (size_t i = 0; i < key.objects.size(); ++i) {
    if (slot.objects[i].get() == key.objects[i]) continue;
    THPObjectPtr mine = slot.objects[i].dup();  // the table may change under the comparison
    const int equal = PyObject_RichCompareBool(mine.get(), key.objects[i], Py_EQ);
    mine = nullptr;  // released before the check below, since this too may run Python code
    if (equal < 0) return Same::kFailed;
    if (version != version_) return Same::kChanged;  // `slot` may have been deleted: do not read it
    if (equal == 0) return Same::kNo;
  }
  return Same::kYes;
}

Entry* PlanTable::find(const Key& key, bool* failed) {
  *failed = false;
  if (order_.empty()) return nullptr;
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
    if (found == Same::kYes) {
      slot->asked = true;
      return slot->entry;
    }
  }
}

void PlanTable::insert(const Key& key, Entry* entry) {
  if (entry->is_copy && ++sizes_met_ % kSizesBetween == 0) give_back_holes();
  auto* slot = new Slot(key, entry);
  Slot* oldest = order_.size() < most_ ? nullptr : take_oldest();
  if (oldest == nullptr) {
    if (slots_.size() < 2 * (order_.size() + 1)) grow();
    order_.push_back(slot);
  } else {
    order_[hand_] = slot;
    hand_ = (hand_ + 1) % order_.size();
  }
  place(slot);
  ++version_;
  delete oldest;  // last, since releasing objects may run Python code, which may use the table
}

void PlanTable::place(Slot* slot) {
  const size_t mask = slots_.size() - 1;
  size_t at = slot->hash & mask;
  while (slots_[at] != nullptr) at = (at + 1) & mask;
  slots_[at] = slot;
}

// Removes a slot that was not found since the hand last passed from `slots_`, and returns it. The
// hand stays at the slot's place in `order_`, for the caller to overwrite.
PlanTable::Slot* PlanTable::take_oldest() {
  while (order_[hand_]->asked) {
    order_[hand_]->asked = false;
    hand_ = (hand_ + 1) % order_.size();
  }
  remove(order_[hand_]);
  return order_[hand_];
}

// Removes a slot from `slots_` and closes the gap: later slots of the same probe sequence move up,
// since a look-up stops at an empty slot.
void PlanTable::remove(const Slot* slot) {
  const size_t mask = slots_.size() - 1;
  size_t gap = slot->hash & mask;
  while (slots_[gap] != slot) gap = (gap + 1) & mask;
  for (size_t at = (gap + 1) & mask; slots_[at] != nullptr; at = (at + 1) & mask) {
    const size_t wanted = slots_[at]->hash & mask;
    if (((at - wanted) & mask) >= ((at - gap) & mask)) {
      slots_[gap] = slots_[at];
      gap = at;
    }
  }
  slots_[gap] = nullptr;
}

void PlanTable::grow() {
  slots_.assign(slots_.empty() ? 256 : 2 * slots_.size(), nullptr);
  for (Slot* slot : order_) place(slot);
}

void PlanTable::clear() {
  std::vector<Slot*> before;
  before.swap(order_);  // releasing objects may run Python code, which must find the table empty
  slots_.clear();
  hand_ = 0;
  ++version_;
  for (Slot* slot : before) delete slot;
}

std::vector<Entry*> PlanTable::entries() const {
  std::vector<Entry*> found;
  for (Slot* slot : order_) found.push_back(slot->entry);
  return found;
}

}  // namespace consistent::dispatch
