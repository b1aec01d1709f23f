#include "aside.h"

#include <ATen/ThreadLocalState.h>
#include <ATen/autocast_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <c10/util/Exception.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <array>
#include <memory>
#include <optional>
#include <thread>

namespace consistent::dispatch {
namespace {

constexpr std::array<at::DeviceType, 2> kDevices = {at::kCPU, at::kCUDA};
constexpr const char* kCapsule = "consistent.set_aside";

// The state of a fresh thread, in which no mode or hook was ever switched on. torch has no function
// that gives this state, so a thread is started once to read it.
const at::ThreadLocalState& untouched() {
  static const std::unique_ptr<at::ThreadLocalState> state = [] {
    std::unique_ptr<at::ThreadLocalState> made;
    std::thread([&made] {
      at::enableRecordFunction(false);
      made = std::make_unique<at::ThreadLocalState>();
    }).join();
    return made;
  }();
  return *state;
}

struct Autocast {
  bool enabled;
  at::ScalarType dtype;
};

std::array<Autocast, kDevices.size()> autocast_now() {
  std::array<Autocast, kDevices.size()> found;
  for (size_t i = 0; i < kDevices.size(); ++i) {
    found[i] = {at::autocast::is_autocast_enabled(kDevices[i]),
                at::autocast::get_autocast_dtype(kDevices[i])};
  }
  return found;
}

void set_autocast(const std::array<Autocast, kDevices.size()>& wanted) {
  for (size_t i = 0; i < kDevices.size(); ++i) {
    at::autocast::set_autocast_enabled(kDevices[i], wanted[i].enabled);
    at::autocast::set_autocast_dtype(kDevices[i], wanted[i].dtype);
  }
}

// Drops warnings. Otherwise a warning of an op in planning would be collected by HANDLE_TH_ERRORS
// of the user's call around it, and be shown when that call ends.
class Silent : public c10::WarningHandler {
 public:
  void process(const c10::Warning&) override {}
};

struct Before {
  at::ThreadLocalState state;
  c10::WarningHandler* warnings = c10::WarningUtils::get_warning_handler();
};

void forget(PyObject* capsule) {
  delete static_cast<Before*>(PyCapsule_GetPointer(capsule, kCapsule));
}

PyObject* set_modes_aside(std::unique_ptr<Before> before) {
  HANDLE_TH_ERRORS
  PyObject* capsule = PyCapsule_New(before.get(), kCapsule, forget);
  if (capsule == nullptr) return nullptr;
  before.release();
  const auto autocast = autocast_now();
  at::ThreadLocalState::setThreadLocalState(untouched());
  set_autocast(autocast);
  return capsule;
  END_HANDLE_TH_ERRORS
}

PyObject* bring_modes_back(const Before& kept) {
  HANDLE_TH_ERRORS
  const auto autocast = autocast_now();
  at::ThreadLocalState::setThreadLocalState(kept.state);
  set_autocast(autocast);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

}  // namespace

// The warning handler is set outside of HANDLE_TH_ERRORS, which installs a handler of its own and
// restores the previous one when its scope ends.
PyObject* set_aside(PyObject*, PyObject*) {
  static Silent silent;
  PyObject* capsule = set_modes_aside(std::make_unique<Before>());
  if (capsule != nullptr) c10::WarningUtils::set_warning_handler(&silent);
  return capsule;
}

PyObject* bring_back(PyObject*, PyObject* before) {
  auto* kept = static_cast<Before*>(PyCapsule_GetPointer(before, kCapsule));
  if (kept == nullptr) return nullptr;
  c10::WarningUtils::set_warning_handler(kept->warnings);
  return bring_modes_back(*kept);
}

const char* recorder() {
  using c10::impl::TorchDispatchModeKey;
  using c10::impl::TorchDispatchModeTLS;
  if (torch::jit::tracer::isTracing()) return "torch.jit.trace";
  if (!TorchDispatchModeTLS::any_modes_set()) return nullptr;
  if (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::PROXY)) return "a tracer (make_fx)";
  if (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FAKE)) return "FakeTensorMode";
  if (TorchDispatchModeTLS::get_mode(TorchDispatchModeKey::FUNCTIONAL)) {
    return "FunctionalTensorMode";
  }
  return nullptr;
}

}  // namespace consistent::dispatch
