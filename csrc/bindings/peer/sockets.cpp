#include "../../peer/sockets.h"

#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <utility>
#include <vector>

#include "methods.h"

namespace consistent::peer {
namespace {

constexpr size_t kShort = 16 * 1024;  // bytes that are copied while the GIL is held

// A message in the memory of `x`, which must be contiguous CPU memory. The message keeps the
// storage of `x` alive until it is done.
std::shared_ptr<Message> message(int rank, uint32_t tag, const Tensor& x) {
  need(x.is_cpu() && x.is_contiguous(), "contiguous CPU memory is sent and received");
  auto made = std::make_shared<Message>();
  made->rank = rank;
  made->tag = tag;
  made->failures = failures.load();
  made->data = static_cast<char*>(x.data_ptr());
  made->bytes = x.nbytes();
  made->owner = std::make_shared<c10::Storage>(x.storage());
  return made;
}

std::shared_ptr<Message> send(Sockets& sockets, int rank, uint32_t tag, const Tensor& x) {
  const auto made = message(rank, tag, x.resolve_conj().resolve_neg().contiguous());
  if (made->bytes <= kShort) {
    sockets.send(made);
  } else {
    const pybind11::gil_scoped_release free;
    sockets.send(made);
  }
  return made;
}

std::shared_ptr<Message> receive(Sockets& sockets, int rank, uint32_t tag, const Tensor& x) {
  const auto made = message(rank, tag, x);
  sockets.receive(made);
  return made;
}

// Throws what a signal handler has raised.
bool signals_raise() {
  const pybind11::gil_scoped_acquire held;
  if (PyErr_CheckSignals() != 0) throw pybind11::error_already_set();
  return false;
}

// The destructor joins the background thread, which may be waiting for the GIL.
struct EndWithoutGil {
  void operator()(Sockets* sockets) const {
    const pybind11::gil_scoped_release free;
    delete sockets;
  }
};
using OwnedSockets = std::unique_ptr<Sockets, EndWithoutGil>;

OwnedSockets make_sockets(int ranks, double timeout_s, const pybind11::object& alarm) {
  Callbacks callbacks;
  callbacks.interrupted = signals_raise;
  callbacks.alarm = alarm_of(alarm.ptr());
  return OwnedSockets(new Sockets(ranks, timeout_s, std::move(callbacks)));
}

}  // namespace

void add_sockets(PyObject* module) {
  const auto inside = pybind11::reinterpret_borrow<pybind11::module_>(module);
  using Free = pybind11::call_guard<pybind11::gil_scoped_release>;
  pybind11::class_<Message, std::shared_ptr<Message>>(inside, "Message");
  pybind11::class_<Sockets, OwnedSockets>(inside, "Sockets")
      .def(pybind11::init(&make_sockets))
      .def("leave_by", &Sockets::leave_by, Free())
      .def("arrive_by", &Sockets::arrive_by, Free())
      .def("reaches", &Sockets::reaches, Free())
      .def("send", &send)
      .def("receive", &receive)
      .def("wait", &Sockets::wait, Free())
      .def("close", &Sockets::close, Free());
}

}  // namespace consistent::peer
