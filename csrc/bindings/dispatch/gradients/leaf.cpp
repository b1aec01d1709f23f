#include "leaf.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <atomic>

#include "../hook.h"
#include "../lookup/key.h"

namespace consistent::dispatch {
namespace {

using torch::autograd::variable_list;

// Whether the engine will add the gradient to the leaf's `.grad`: not in torch.autograd.grad. An
// empty exec_info means a plain backward(), which runs all nodes.
bool accumulates(const at::Tensor& leaf) {
  const auto* executed = torch::autograd::get_current_graph_task_exec_info();
  if (executed == nullptr || executed->empty()) return true;
  const auto node = torch::autograd::impl::try_get_grad_accumulator(leaf);
  if (!node) return false;
  const auto found = executed->find(node.get());
  return found != executed->end() && found->second.needed_;
}

bool is_leaf_hook(const std::unique_ptr<torch::autograd::FunctionPreHook>& hook) {
  return dynamic_cast<LeafHook*>(hook.get()) != nullptr;
}

}  // namespace

LeafHook* LeafHook::of(const at::Tensor& leaf) {
  for (const auto& each : torch::autograd::impl::hooks(leaf)) {
    if (auto* found = dynamic_cast<LeafHook*>(each.get())) return found;
  }
  return nullptr;
}

void LeafHook::remove(const at::Tensor& leaf) {
  auto& hooks = torch::autograd::impl::hooks(leaf);
  hooks.erase(std::remove_if(hooks.begin(), hooks.end(), is_leaf_hook), hooks.end());
}

void LeafHook::enter(const at::Tensor& leaf, int64_t bucket, int64_t nbytes) {
  LeafHook* before = of(leaf);
  auto& hooks = torch::autograd::impl::hooks(leaf);
  if (before != nullptr &&
      before == hooks.back().get()) {  // it may be running, so it is not replaced
    before->bucket = bucket, before->nbytes = nbytes;
    return;
  }
  static std::atomic<int64_t> entered{
      0};  // equal on all ranks: they watch leaves in the same order
  const int64_t number = before != nullptr ? before->number : entered++;
  auto made = std::make_unique<LeafHook>(leaf.unsafeGetTensorImpl(), bucket, nbytes, number);
  made->partial = before != nullptr && before->partial;
  remove(leaf);
  hooks.push_back(std::move(made));
}

// Whether the leaf has no gradient yet, or has one in the layout in which the next one is added.
bool LeafHook::lies_as_wanted(const at::Tensor& leaf, bool sync) const {
  const at::Tensor& held = leaf.grad();
  if (!held.defined()) return true;
  const pybind11::gil_scoped_acquire gil;
  THPObjectPtr object = wrap(held), owner = wrap(leaf);
  if (Py_TYPE(object.get()) != global_class()) return partial != sync;
  PyObject *spec = spec_of(object.get()), *own = spec_of(owner.get());
  if (spec == nullptr || own == nullptr) checked(nullptr);
  return spec == checked(PyObject_GetAttrString(own, sync ? "settled" : "dual")).get();
}

bool LeafHook::is_simple(const at::Tensor& leaf, const at::Tensor& grad,
                         const Backward& run) const {
  return !at::GradMode::is_enabled() && grad.layout() == at::kStrided &&
         grad.scalar_type() == leaf.scalar_type() && (bucket < 0 || nbytes < run.at_once()) &&
         torch::autograd::impl::post_acc_grad_hooks(leaf) == nullptr &&
         lies_as_wanted(leaf, run.sync);
}

variable_list LeafHook::operator()(const variable_list& grads) {
  // reclaim_copy takes a new reference: the leaf must live until this hook returns.
  const at::Tensor leaf(
      c10::intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>::reclaim_copy(leaf_));
  if (!grads[0].defined() || !accumulates(leaf)) return grads;
  Backward& run = Backward::current();
  run.begin();
  if (is_simple(leaf, grads[0], run)) {
    partial = !run.sync;
    if (!run.sync || bucket < 0) return grads;
    run.add(leaf, grads[0], *this, false);
    return {at::Tensor()};
  }
  PyObject* unshared = nobody_else_holds(grads[0]) ? Py_True : Py_False;
  const pybind11::gil_scoped_acquire gil;
  THPObjectPtr owner = wrap(leaf), addend = wrap(grads[0]);
  THPObjectPtr given = checked(
      PyObject_CallFunctionObjArgs(leaves.take, owner.get(), addend.get(), unshared, nullptr));
  if (given.get() == Py_None) return {at::Tensor()};
  return {THPVariable_Unpack(given.get())};
}

PyObject* gradient(PyObject* object) {
  const at::Tensor& leaf = THPVariable_Unpack(object);
  Backward& run = Backward::current();
  if (run.any() && !run.of(leaf).empty()) return PyObject_CallOneArg(leaves.shown, object);
  return held_gradient(object);
}

namespace {

// Gives `grad`, which autograd has just made for `owner`, its spec: that of a summed gradient if
// `owner` is a leaf, else the dual of `owner`'s.
bool give_spec(PyObject* owner, PyObject* grad) {
  const at::Tensor& tensor = THPVariable_Unpack(owner);
  const LeafHook* hook = LeafHook::of(tensor);
  const bool whole = tensor.is_leaf() && (hook == nullptr || !hook->partial);
  PyObject* own = spec_of(owner);
  if (own == nullptr) return false;
  THPObjectPtr spec = checked(PyObject_GetAttrString(own, whole ? "settled" : "dual"));
  if (THPVariable_Unpack(grad).scalar_type() != tensor.scalar_type()) {
    THPObjectPtr dtype = checked(PyObject_GetAttrString(grad, "dtype"));
    spec = checked(PyObject_CallMethod(spec.get(), "with_dtype", "O", dtype.get()));
  }
  return attach(grad, spec.get());
}

}  // namespace

PyObject* held_gradient(PyObject* owner) {
  const at::Tensor& found = THPVariable_Unpack(owner).grad();
  if (!found.defined()) Py_RETURN_NONE;
  if (found._is_zerotensor()) {  // an efficient zero tensor has no memory: make an ordinary one
    THPVariable_Unpack(owner).mutable_grad() = found.clone();
    return held_gradient(owner);
  }
  THPObjectPtr grad = wrap(found);
  if (Py_TYPE(grad.get()) != global_class() && !give_spec(owner, grad.get())) return nullptr;
  return grad.release();
}

bool watch_if_leaf(PyObject* tensor) {
  const auto* meta = torch::autograd::impl::get_autograd_meta(THPVariable_Unpack(tensor));
  if (meta == nullptr || !meta->requires_grad_ || leaves.watch == nullptr) return true;
  PyObject* done = PyObject_CallOneArg(leaves.watch, tensor);
  Py_XDECREF(done);
  return done != nullptr;
}

}  // namespace consistent::dispatch
