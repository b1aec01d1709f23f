#include "waiting.h"

#include <ATen/core/grad_mode.h>
#include <ATen/ops/cat.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>

#include "leaf.h"

namespace consistent::dispatch {

Leaves leaves;

THPObjectPtr checked(PyObject* made) {
  if (made != nullptr) return THPObjectPtr(made);
  python_error error;
  error.persist();
  throw error;
}

THPObjectPtr wrap(const at::Tensor& x) { return checked(THPVariable_Wrap(x)); }

int64_t integer_in(PyObject* number) {
  const long long found = PyLong_AsLongLong(number);
  if (found == -1 && PyErr_Occurred() != nullptr) checked(nullptr);
  return found;
}

bool nobody_else_holds(const at::Tensor& x) {
  return x.use_count() == 1 && x.has_storage() && x.storage().use_count() == 1;
}

namespace {

void finish() {
  if (!Backward::current().any()) return;
  const pybind11::gil_scoped_acquire gil;
  checked(PyObject_CallNoArgs(leaves.finish));
}

void append(THPObjectPtr& list, THPObjectPtr item) {
  if (PyList_Append(list.get(), item.get()) != 0) checked(nullptr);
}

// A number that orders `held` addends in the same way on all ranks. For a leaf that is summed it is
// the leaf's number, since ranks watch leaves in the same order. For a leaf that is split it is the
// negative sequence number of the node that gathered it in forward.
int64_t order_of(const at::Tensor& leaf) {
  const LeafHook* hook = LeafHook::of(leaf);
  if (hook != nullptr && hook->bucket >= 0) return hook->number;
  const auto node = torch::autograd::get_current_node();
  return node == nullptr ? 0 : -static_cast<int64_t>(node->sequence_nr());
}

// `.grad` += sum, by torch's own code. `stealable`: `sum` may become `.grad` without a copy.
void accumulate_sum(const at::Tensor& leaf, const at::Tensor& sum, bool stealable) {
  at::Tensor& held = leaf.mutable_grad();
  torch::autograd::AccumulateGrad::accumulateGrad(
      leaf, held, sum, stealable ? 1 : 0, [&held](at::Tensor&& made) { held = std::move(made); });
}

}  // namespace

Backward& Backward::current() {
  thread_local Backward found;
  return found;
}

void Backward::begin() {
  const int task = torch::autograd::get_current_graph_task_id();
  if (task == task_ && task != -1) return;
  const pybind11::gil_scoped_acquire gil;
  at_once_ = integer_in(checked(PyObject_CallNoArgs(leaves.at_once)).get());
  task_ = task;
  if (task != -1) torch::autograd::Engine::get_default_engine().queue_callback(finish);
}

void Backward::put(Waiting each, int64_t nbytes) {
  const int64_t bucket = each.bucket;
  // An efficient zero tensor has no memory to send.
  if (each.addend._is_zerotensor()) each.addend = each.addend.clone();
  waiting_.push_back(std::move(each));
  if (bucket < 0) return;
  if (static_cast<int64_t>(buckets_.size()) <= bucket) buckets_.resize(bucket + 1);
  Bucket& into = buckets_[bucket];
  if (into.nbytes == 0) {
    const pybind11::gil_scoped_acquire gil;
    into.limit = integer_in(checked(PyObject_CallFunction(leaves.limit, "Li", (long long)bucket,
                                                          static_cast<int>(into.launched)))
                                .get());
  }
  into.nbytes += nbytes;
}

void Backward::add(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook,
                   bool replaces) {
  put({leaf, addend, hook.bucket, hook.number, replaces}, hook.nbytes);
  launch_if_full(hook.bucket);
}

size_t Backward::hold(const at::Tensor& leaf, const at::Tensor& addend, int64_t bucket,
                      int64_t nbytes) {
  begin();
  Waiting each{leaf, addend, bucket, order_of(leaf), false};
  each.held = true;
  each.launched = bucket < 0;
  put(std::move(each), nbytes);
  return waiting_.size() - 1;
}

void Backward::launch_if_full(int64_t bucket) {
  const Bucket& found = buckets_.at(bucket);
  if (found.nbytes < found.limit) return;
  const pybind11::gil_scoped_acquire gil;
  launch(bucket);
}

void Backward::let_go(size_t position) {
  Waiting& each = waiting_.at(position);
  each.addend.reset();
  each.sent = true;
}

bool Backward::take_back(size_t position) {
  Waiting& each = waiting_.at(position);
  each.sent = false;
  return !each.dropped;
}

void Backward::launch(int64_t bucket) {
  std::vector<size_t> order;
  for (size_t i = 0; i < waiting_.size(); ++i) {
    if (waiting_[i].bucket == bucket && !waiting_[i].launched) order.push_back(i);
  }
  // Gradients may arrive in another order on a rank whose shard is empty, since torch may run other
  // ops there; all ranks must lay out the bucket in the same order.
  std::stable_sort(order.begin(), order.end(), [this](size_t one, size_t other) {
    return waiting_[one].number < waiting_[other].number;
  });
  buckets_[bucket] = {0, 0, true};
  launch(order);
}

void Backward::launch(const std::vector<size_t>& order, bool as_it_is) {
  const at::NoGradGuard no_grad;
  THPObjectPtr positions = checked(PyList_New(0)), owners = checked(PyList_New(0));
  std::vector<at::Tensor> flat;
  for (const size_t i : order) {
    Waiting& each = waiting_[i];
    each.launched = true;
    append(positions, checked(PyLong_FromSize_t(i)));
    append(owners, wrap(each.leaf));
    if (!each.held) flat.push_back(each.addend.reshape(-1));
  }
  if (flat.empty()) {
    checked(PyObject_CallFunctionObjArgs(leaves.send, positions.get(), nullptr));
    return;
  }
  THPObjectPtr given = wrap(as_it_is ? flat[0] : at::cat(flat));
  checked(PyObject_CallFunctionObjArgs(leaves.launch, positions.get(), owners.get(), given.get(),
                                       nullptr));
}

void Backward::add_alone(const at::Tensor& leaf, const at::Tensor& addend, const LeafHook& hook) {
  waiting_.push_back({leaf, addend, hook.bucket, hook.number, false});
  launch({waiting_.size() - 1}, true);
}

void Backward::launch_all() {
  // Buckets are launched in the order of their lowest numbers, which is the same on all ranks; the
  // order in which gradients arrive need not be.
  std::vector<const Waiting*> left;
  for (const Waiting& each : waiting_) {
    if (!each.launched) left.push_back(&each);
  }
  std::stable_sort(left.begin(), left.end(), [](const Waiting* one, const Waiting* other) {
    return one->number < other->number;
  });
  std::vector<int64_t> order;
  for (const Waiting* each : left) {
    if (std::find(order.begin(), order.end(), each->bucket) == order.end()) {
      order.push_back(each->bucket);
    }
  }
  for (const int64_t bucket : order) launch(bucket);
}

void Backward::accumulate(const std::vector<size_t>& positions, const at::Tensor& flat) {
  const at::NoGradGuard no_grad;
  int64_t start = 0;
  const bool alone = positions.size() == 1;
  for (const size_t position : positions) {
    Waiting& each = waiting_.at(position);
    const int64_t count = each.addend.numel();
    settle(each, flat.narrow(0, start, count).view(each.addend.sizes()), alone);
    start += count;
  }
}

void Backward::settle(Waiting& each, const at::Tensor& part, bool alone) {
  const at::Tensor addend = std::move(each.addend);
  if (each.dropped) return;
  if (each.replaces) {
    THPObjectPtr leaf = wrap(each.leaf), sum = wrap(part.clone());
    checked(PyObject_CallFunctionObjArgs(leaves.settle, leaf.get(), sum.get(), nullptr));
  } else if (alone) {  // `part` is all of `flat`, so its memory may become that of the gradient
    accumulate_sum(each.leaf, part, true);
  } else if (!each.leaf.grad().defined() && nobody_else_holds(addend)) {
    addend.copy_(part);
    accumulate_sum(each.leaf, addend, true);
  } else {
    accumulate_sum(each.leaf, part, false);
  }
}

std::vector<Waiting*> Backward::of(const at::Tensor& leaf) {
  std::vector<Waiting*> found;
  for (Waiting& each : waiting_) {
    const bool waits = each.addend.defined() || each.sent;
    if (each.leaf.is_same(leaf) && !each.dropped && waits) found.push_back(&each);
  }
  return found;
}

void Backward::drop(const at::Tensor& leaf) {
  for (Waiting* each : of(leaf)) each->dropped = true;
}

void Backward::clear() {
  waiting_.clear();
  buckets_.clear();
  task_ = -1;
}

}  // namespace consistent::dispatch
