// Peer-memory moves between the ranks of one host, as the module mirrored.transports._C.
//
// A Group's methods take and give CPU tensors; they release the GIL while they copy and wait. All
// raise RuntimeError, on every rank, where ranks make calls that do not fit or one has died.

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <Python.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "arguments.h"
#include "methods.h"

namespace consistent::peer {
namespace {

struct PyGroup {
  PyObject_HEAD Group* group;
};

Group& group_of(PyObject* self) { return *reinterpret_cast<PyGroup*>(self)->group; }

// ---- memory -------------------------------------------------------------------------------------

constexpr size_t kHuge = size_t(2) << 20;  // bytes of a huge page

// Not by the dispatcher: no mode or key may turn it into something else than memory. Large ones ask
// for huge pages: to touch a new page costs more than to fill it.
Tensor empty(at::IntArrayRef shape, at::ScalarType type) {
  const Tensor x = at::detail::empty_cpu(shape, type);
  if (x.nbytes() < 2 * kHuge) return x;
  const uintptr_t start = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t first = (start + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (start + x.nbytes()) / kHuge * kHuge;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return x;
}

Tensor empty_with(const Tensor& x, int dim, int64_t size) {
  Sizes shape = x.sizes().vec();
  shape[dim] = size;
  return empty(shape, x.scalar_type());
}

// The parts of contiguous `x` that `sizes` cut along `dim`.
std::vector<Rows> parts(const Tensor& x, int dim, const Sizes& sizes) {
  int64_t outer = 1, inner = x.element_size(), start = 0;
  for (int d = 0; d < dim; ++d) outer *= x.size(d);
  for (int d = dim + 1; d < int(x.dim()); ++d) inner *= x.size(d);
  std::vector<Rows> cuts;
  for (const int64_t size : sizes) {
    cuts.push_back(cut(x.data_ptr(), outer, x.size(dim), inner, start, size));
    start += size;
  }
  return cuts;
}

Rows whole(const Tensor& x) { return joined(x.data_ptr(), int64_t(x.nbytes())); }

std::vector<Rows> wholes(const std::vector<Tensor>& xs) {
  std::vector<Rows> boxes;
  for (const Tensor& x : xs) boxes.push_back(whole(x));
  return boxes;
}

// Throws if `sizes` do not make up the dim: after the others were told, so that a rank whose tensor
// or sizes differ does not leave them waiting.
void check_cut(Group& group, const Call& call, const Tensor& x, int dim, const Sizes& sizes) {
  if (total(sizes) == x.size(dim)) return;
  {
    const pybind11::gil_scoped_release free;
    group.check(call, sizes, Sizes(group.size(), sizes[group.me()]));
  }
  need_cut(call, x, dim, sizes);
}

PyObject* given(const Tensor& x) { return THPVariable_Wrap(x); }

// ---- methods ------------------------------------------------------------------------------------

// all_reduce(x, op, in_place) -> Tensor
PyObject* all_reduce(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const Op op = op_of(arguments[1]);
  const Type type = type_of(x.scalar_type());
  const bool in_place = arguments[2] == Py_True;
  const Tensor out = in_place ? x : empty(x.sizes(), x.scalar_type());
  const int64_t elements = x.numel() * pairs_of(x.scalar_type());
  const Call call = call_all_reduce(x, op);
  {
    const pybind11::gil_scoped_release free;
    group.all_reduce(call, x.data_ptr(), out.data_ptr(), elements, type, op);
  }
  return given(out);
}

// reduce_scatter(x, dim, sizes, op) -> Tensor
PyObject* reduce_scatter(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const int dim = dim_of(arguments[1], x);
  const Sizes sizes = sizes_of(arguments[2], group);
  const Op op = op_of(arguments[3]);
  const Type type = type_of(x.scalar_type());
  const Tensor out = empty_with(x, dim, sizes[group.me()]);
  const Call call = call_reduce_scatter(x, dim, op);
  check_cut(group, call, x, dim, sizes);
  {
    const pybind11::gil_scoped_release free;
    group.reduce_scatter(call, parts(x, dim, sizes), out.data_ptr(), type, op);
  }
  return given(out);
}

// all_gather(x, dim, sizes) -> Tensor
PyObject* all_gather(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const int dim = dim_of(arguments[1], x);
  const Sizes sizes = sizes_of(arguments[2], group);
  const Tensor out = empty_with(x, dim, total(sizes));
  const Call call = call_all_gather(x, dim);
  {
    const pybind11::gil_scoped_release free;
    group.all_gather(call, whole(x), parts(out, dim, sizes));
  }
  return given(out);
}

// all_to_all(x, split_dim, split_sizes, concat_dim, concat_sizes) -> Tensor
PyObject* all_to_all(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const int split = dim_of(arguments[1], x), dim = dim_of(arguments[3], x);
  const Sizes split_sizes = sizes_of(arguments[2], group);
  const Sizes sizes = sizes_of(arguments[4], group);
  Sizes shape = x.sizes().vec();
  shape[split] = split_sizes[group.me()];
  shape[dim] = total(sizes);
  const Tensor out = empty(shape, x.scalar_type());
  const Call call = call_all_to_all(x, split, dim);
  check_cut(group, call, x, split, split_sizes);
  {
    const pybind11::gil_scoped_release free;
    group.all_to_all(call, parts(x, split, split_sizes), parts(out, dim, sizes));
  }
  return given(out);
}

// gather_into(x, outs): every rank's x into the contiguous outs
PyObject* gather_into(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const std::vector<Tensor> outs = tensors(arguments[1], group);
  const pybind11::gil_scoped_release free;
  group.all_gather(call_of(Kind::all_gather, x, false), whole(x), wholes(outs));
  return Py_None;
}

// trade_into(pieces, outs, exchanging): pieces[k] to rank k, the contiguous outs[k] from it
PyObject* trade_into(Group& group, Arguments arguments) {
  const std::vector<Tensor> pieces = tensors(arguments[0], group);
  const std::vector<Tensor> outs = tensors(arguments[1], group);
  // Messages of an exchange differ in dtype, and are bytes here.
  const Kind kind = arguments[2] == Py_True ? Kind::exchange : Kind::all_to_all;
  const Call call = kind == Kind::exchange ? Call{kind} : call_of(kind, pieces[0], false);
  const pybind11::gil_scoped_release free;
  group.all_to_all(call, wholes(pieces), wholes(outs));
  return Py_None;
}

// broadcast(x, shape, dtype, source) -> Tensor: that of the source-th rank, which alone reads x
PyObject* broadcast(Group& group, Arguments arguments) {
  const at::ScalarType type = dtype(arguments[2]);
  const int source = source_of(arguments[3], group);
  const Tensor out = empty(integers(arguments[1]), type);
  const Tensor x = source == group.me() ? plain(arguments[0]) : Tensor();
  const Call call = call_broadcast(out, source, group);
  {
    const pybind11::gil_scoped_release free;
    const bool fits = !x.defined() || (x.sizes() == out.sizes() && x.scalar_type() == type);
    if (!fits) {  // the others must not wait for a rank that only raises
      group.check(call_of(Kind::broadcast, x), Sizes(group.size()), Sizes(group.size()));
      throw std::invalid_argument("x has not the shape and dtype that were promised");
    }
    group.broadcast(call, source, x.defined() ? x.data_ptr() : nullptr, out.data_ptr(),
                    int64_t(out.nbytes()));
  }
  return given(out);
}

// gather_objects(bytes) -> list of every rank's
PyObject* gather_objects(Group& group, Arguments arguments) {
  const std::string mine = pybind11::cast<std::string>(arguments[0]);
  std::vector<std::string> all;
  {
    const pybind11::gil_scoped_release free;
    all = group.gather_objects(mine);
  }
  pybind11::list list;
  for (const std::string& text : all) list.append(pybind11::bytes(text));
  return list.release().ptr();
}

// stage(x) -> every rank's x, as tensors in shared memory that may be read until unstage()
PyObject* stage(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  need(group.room() >= int64_t(x.nbytes()), "there is no room for this tensor");
  std::vector<void*> places;
  {
    const pybind11::gil_scoped_release free;
    places = group.stage(call_of(Kind::peers, x), x.data_ptr(), int64_t(x.nbytes()));
  }
  pybind11::list list;
  for (void* place : places) {
    const Tensor view = at::from_blob(place, x.sizes(), x.options());
    list.append(pybind11::reinterpret_steal<pybind11::object>(given(view)));
  }
  return list.release().ptr();
}

PyObject* unstage(Group& group, Arguments) {
  group.unstage();
  return Py_None;
}

// unlink(): the names of the segments, once all have mapped them
PyObject* unlink(Group& group, Arguments) {
  group.unlink();
  return Py_None;
}

// room() -> the most bytes that stage() takes
PyObject* room(Group& group, Arguments) { return PyLong_FromLongLong(group.room()); }

// grow(name, bytes) -> name: more room, in a new segment (name None) or in that of another rank
PyObject* grow(Group& group, Arguments arguments) {
  const int64_t bytes = integer(arguments[1]);
  const size_t all = size_t(bytes) * size_t(group.size());
  const bool first = arguments[0] == Py_None;
  Segment segment =
      first ? Segment::create(all)
            : Segment::attach(pybind11::cast<std::string>(pybind11::handle(arguments[0])), all);
  const std::string name = segment.name();
  group.set_bulk(std::move(segment), bytes);
  return PyUnicode_FromString(name.c_str());
}

// shrink(): no more room than a slot has, as before grow()
PyObject* shrink(Group& group, Arguments) {
  group.set_bulk(std::nullopt, 0);
  return Py_None;
}

// set_one_shot(bytes, narrow): all-reduces up to so many send everything to all
PyObject* set_one_shot(Group& group, Arguments arguments) {
  group.set_one_shot(integer(arguments[0]), integer(arguments[1]));
  return Py_None;
}

// ---- the type -----------------------------------------------------------------------------------

template <typename Body>
PyObject* guarded(Body body) {
  try {
    return body();
  } catch (pybind11::error_already_set& error) {
    error.restore();
  } catch (const std::invalid_argument& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const pybind11::cast_error& error) {
    PyErr_SetString(PyExc_TypeError, error.what());
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

template <PyObject* (*method)(Group&, Arguments), int count>
PyObject* entry(PyObject* self, PyObject* const* arguments, Py_ssize_t given) {
  return guarded([&]() -> PyObject* {
    need(given == count, "another number of arguments is needed");
    PyObject* result = method(group_of(self), arguments);
    if (result == Py_None) Py_INCREF(result);
    return result;
  });
}

#define METHOD(NAME, COUNT)                                                            \
  {#NAME, reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&entry<NAME, COUNT>)), \
   METH_FASTCALL, nullptr}

PyMethodDef methods[] = {
    METHOD(all_reduce, 3),
    METHOD(reduce_scatter, 4),
    METHOD(all_gather, 3),
    METHOD(all_to_all, 5),
    METHOD(gather_into, 2),
    METHOD(trade_into, 3),
    METHOD(broadcast, 4),
    METHOD(gather_objects, 1),
    METHOD(stage, 1),
    METHOD(unstage, 0),
    METHOD(unlink, 0),
    METHOD(set_one_shot, 2),
    METHOD(room, 0),
    METHOD(grow, 2),
    METHOD(shrink, 0),
    METHOD(meet_all_reduce, 2),
    METHOD(meet_reduce_scatter, 4),
    METHOD(meet_all_gather, 3),
    METHOD(meet_all_to_all, 5),
    METHOD(meet_broadcast, 4),
    METHOD(meet_peers, 1),
    {nullptr, nullptr, 0, nullptr},
};

// Whether a signal's handler raised; `guarded` lets what it raised pass.
bool interrupted() {
  const pybind11::gil_scoped_acquire held;
  return PyErr_CheckSignals() != 0;
}

// Group(name, me, ranks, slot_bytes, timeout_s); without a name, makes the segment
PyObject* make(PyTypeObject* type, PyObject* arguments, PyObject*) {
  return guarded([&]() -> PyObject* {
    const char* name = nullptr;
    PyObject* ranks = nullptr;
    int me = 0;
    long long slot_bytes = 0;
    double timeout_s = 0;
    if (!PyArg_ParseTuple(arguments, "ziOLd", &name, &me, &ranks, &slot_bytes, &timeout_s)) {
      return nullptr;
    }
    const Sizes all = integers(ranks);
    const int n = int(all.size());
    need(n >= 2 && 0 <= me && me < n, "this rank must be one of two or more");
    need(slot_bytes >= 64 * n, "a slot needs 64 bytes a rank");
    const size_t bytes = Group::segment_bytes(n, slot_bytes);
    Segment segment = name == nullptr ? Segment::create(bytes) : Segment::attach(name, bytes);
    auto group =
        std::make_unique<Group>(std::move(segment), me, std::vector<int>(all.begin(), all.end()),
                                slot_bytes, timeout_s, interrupted);
    PyObject* self = type->tp_alloc(type, 0);
    if (self != nullptr) reinterpret_cast<PyGroup*>(self)->group = group.release();
    return self;
  });
}

void destroy(PyObject* self) {
  PyTypeObject* type = Py_TYPE(self);
  delete reinterpret_cast<PyGroup*>(self)->group;
  type->tp_free(self);
  Py_DECREF(type);
}

PyObject* name(PyObject* self, void*) {
  return PyUnicode_FromString(group_of(self).name().c_str());
}

PyGetSetDef members[] = {
    {"name", name, nullptr, nullptr, nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr},
};

PyType_Slot slots[] = {
    {Py_tp_new, reinterpret_cast<void*>(make)},
    {Py_tp_dealloc, reinterpret_cast<void*>(destroy)},
    {Py_tp_methods, methods},
    {Py_tp_getset, members},
    {0, nullptr},
};

PyType_Spec group_type = {"mirrored.transports._C.Group", sizeof(PyGroup), 0, Py_TPFLAGS_DEFAULT,
                          slots};

PyObject* host(PyObject*, PyObject*) {
  return guarded([] { return PyUnicode_FromString(host_identity().c_str()); });
}

PyObject* clean(PyObject*, PyObject*) {
  return guarded([] {
    remove_abandoned();
    Py_RETURN_NONE;
  });
}

PyMethodDef functions[] = {
    {"host_identity", host, METH_NOARGS, "What is equal for processes that can share memory."},
    {"remove_abandoned", clean, METH_NOARGS, "Unlinks the segments of dead processes."},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace
}  // namespace consistent::peer

PyMODINIT_FUNC PyInit__C(void) {
  using namespace consistent::peer;
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, functions};
  PyObject* made = PyModule_Create(&module);
  PyObject* type = made ? PyType_FromSpec(&group_type) : nullptr;
  if (type == nullptr || PyModule_AddObject(made, "Group", type) != 0) return nullptr;
  add_device_moves(made);
  return made;
}
