#include "numbers.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/_local_scalar_dense_ops.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/anomaly_mode.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/graph_task.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/python_numbers.h>
#include <torch/library.h>

#include <string>
#include <utility>

#include "../lookup/key.h"
#include "holds.h"

namespace consistent::dispatch {
namespace {

// The dispatch key under which we register kernels. BackendSelect comes after autograd and modes
// and before all backends, and torch registers nothing under it for these ops.
constexpr auto kKey = c10::DispatchKey::BackendSelect;
const c10::DispatchKeySet kAfter(c10::DispatchKeySet::FULL_AFTER, kKey);

PyObject* read = nullptr;
std::string instead;
thread_local bool backward_of_shards = false;
thread_local std::string nan_found;  // anomaly mode's message for the first NaN in backward
thread_local const void* last_node = nullptr;  // only compared, never dereferenced
thread_local int64_t outputs_of_node = 0;  // the index of the output of `last_node` being checked

// The Python object of a tensor, borrowed. torch 2.11 calls the function check_pyobj; the int or
// long parameter makes overload resolution prefer load_pyobj where it exists.
template <typename Slot>
auto object_in(const Slot& slot, int) -> decltype(slot.load_pyobj()) {
  return slot.load_pyobj();
}
template <typename Slot>
PyObject* object_in(const Slot& slot, long) {
  return slot.check_pyobj().value_or(nullptr);
}

// The Python object of `x` if it is a global tensor that user code holds; borrowed, or nullptr.
// Inside the library, and in torch's own code below Python, `x` stands for the shard.
PyObject* global_object(const at::Tensor& x) {
  if (!x.defined() || !hooks_are_on()) return nullptr;
  PyObject* object = object_in(*x.unsafeGetTensorImpl()->pyobj_slot(), 0);
  return object != nullptr && Py_TYPE(object) == global_class() ? object : nullptr;
}

at::Scalar scalar_of(PyObject* number) {
  if (PyBool_Check(number)) return at::Scalar(number == Py_True);
  if (PyLong_Check(number)) return at::Scalar(THPUtils_unpackLong(number));
  if (PyComplex_Check(number)) return at::Scalar(THPUtils_unpackComplexDouble(number));
  return at::Scalar(THPUtils_unpackDouble(number));
}

// Whether this read is anomaly mode's check for a NaN in a gradient, during backward over global
// tensors. The engine reads with the GIL released, and Python code with the GIL held.
bool is_search_for_nan(const at::Tensor& x) {
  using torch::autograd::AnomalyMode;
  return backward_of_shards && x.scalar_type() == at::kBool && AnomalyMode::is_enabled() &&
         AnomalyMode::should_check_nan() && torch::autograd::get_current_graph_task_id() != -1 &&
         !PyGILState_Check();
}

// Whether the backward formula of a node itself reads truth values, to check whether the gradient
// is well defined. Such reads look like anomaly mode's, and must get the true answer.
bool asks_itself(const std::string& node) {
  return node.rfind("LinalgSvd", 0) == 0 || node.rfind("LinalgEig", 0) == 0;
}

// Records whether a NaN was found. Returns whether the engine is to be told that there is none; the
// ranks then agree on the recorded message when all of them have reached the end of backward.
bool keep_nan(bool found) {
  const auto node = torch::autograd::get_current_node();
  if (node == nullptr || asks_itself(node->name())) return false;
  outputs_of_node = node.get() == last_node ? outputs_of_node + 1 : 0;
  last_node = node.get();
  if (!found || !nan_found.empty()) return true;
  nan_found = "Function '" + node->name() + "' returned nan values in its " +
              std::to_string(outputs_of_node) + "th output.";
  node->metadata()->print_stack(node->name());
  return true;
}

at::Scalar number_in(c10::DispatchKeySet keys, const at::Tensor& x) {
  if (is_search_for_nan(x)) {
    // This rank is outside of the gradient's placement and has no values of it.
    if (x.is_meta()) return at::Scalar(false);
    const at::Scalar found = at::_ops::_local_scalar_dense::redispatch(keys & kAfter, x);
    return keep_nan(found.toBool()) ? at::Scalar(false) : found;
  }
  PyObject* object = PyGILState_Check() ? global_object(x) : nullptr;
  if (object == nullptr) return at::_ops::_local_scalar_dense::redispatch(keys & kAfter, x);
  PyObject* number = PyObject_CallOneArg(read, object);
  if (number == nullptr) throw python_error();
  const at::Scalar found = scalar_of(number);
  Py_DECREF(number);
  return found;
}

bool is_global(const c10::IValue& value) {
  if (value.isTensor()) return global_object(value.toTensor()) != nullptr;
  if (!value.isList()) return false;
  for (const c10::IValue& item : value.toListRef()) {
    if (is_global(item)) return true;
  }
  return false;
}

void collective(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const size_t count = op.schema().arguments().size();
  for (const c10::IValue& argument : torch::jit::last(*stack, count)) {
    TORCH_CHECK_TYPE(!is_global(argument), op.schema().name(),
                     ": it was given a global tensor, and a collective of torch.distributed would "
                     "see this rank's shard only. Use ",
                     instead, ".");
  }
  op.redispatchBoxed(keys & kAfter, stack);
}

}  // namespace

PyObject* read_numbers_by(PyObject*, PyObject* function) {
  HANDLE_TH_ERRORS
  read = Py_NewRef(function);
  // Never freed: the dispatcher may be destroyed before static objects are.
  static auto* aten = new torch::Library(torch::Library::IMPL, "aten", kKey, __FILE__, __LINE__);
  aten->impl("_local_scalar_dense", number_in);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* in_backward_of_shards(PyObject*, PyObject* now) {
  const int value = PyObject_IsTrue(now);
  if (value < 0) return nullptr;
  return PyBool_FromLong(std::exchange(backward_of_shards, value != 0));
}

PyObject* take_nan_found(PyObject*, PyObject*) {
  const std::string found = std::exchange(nan_found, {});
  last_node = nullptr;
  return PyUnicode_FromString(found.c_str());
}

PyObject* refuse_collectives(PyObject*, PyObject* what) {
  HANDLE_TH_ERRORS
  const char* text = PyUnicode_AsUTF8(what);
  if (text == nullptr) return nullptr;
  instead = text;
  static auto* c10d = new torch::Library(torch::Library::IMPL, "c10d", kKey, __FILE__, __LINE__);
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("c10d::", 0) != 0) continue;
    const std::string own = name.overload_name.empty() ? "" : "." + name.overload_name;
    c10d->impl((name.name + own).c_str(), torch::CppFunction::makeFromBoxedFunction<&collective>());
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace consistent::dispatch
