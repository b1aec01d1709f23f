// The moves of a Group, on CPU tensors.

#include <ATen/EmptyTensor.h>
#include <sys/mman.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>
#include <utility>

#include "methods.h"

namespace consistent::peer {

constexpr size_t kHuge = size_t(2) << 20;  // bytes of a huge page

// A new CPU tensor. It is not made by the dispatcher, so that no mode can replace it. A large one
// asks for huge pages, because the first access to a page costs more than filling the page.
Tensor empty(at::IntArrayRef shape, at::ScalarType type) {
  const Tensor x = at::detail::empty_cpu(shape, type);
  if (x.nbytes() < 2 * kHuge) return x;
  const uintptr_t start = reinterpret_cast<uintptr_t>(x.data_ptr());
  const uintptr_t first = (start + kHuge - 1) / kHuge * kHuge;
  const uintptr_t last = (start + x.nbytes()) / kHuge * kHuge;
  madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
  return x;
}

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

namespace {

Tensor empty_with(const Tensor& x, int dim, int64_t size) {
  Sizes shape = x.sizes().vec();
  shape[dim] = size;
  return empty(shape, x.scalar_type());
}

Rows whole(const Tensor& x) { return joined(x.data_ptr(), int64_t(x.nbytes())); }

std::vector<Rows> wholes(const std::vector<Tensor>& xs) {
  std::vector<Rows> boxes;
  for (const Tensor& x : xs) boxes.push_back(whole(x));
  return boxes;
}

// Throws if `sizes` do not add up to the size of the dim. Before it throws, it exchanges headers,
// so that the other ranks raise too instead of waiting for this one.
void check_cut(Group& group, const Call& call, const Tensor& x, int dim, const Sizes& sizes) {
  if (total(sizes) == x.size(dim)) return;
  {
    const pybind11::gil_scoped_release free;
    group.check(call, sizes, Sizes(group.size(), sizes[group.me()]));
  }
  need_cut(call, x, dim, sizes);
}

PyObject* given(const Tensor& x) { return THPVariable_Wrap(x); }

}  // namespace

// all_reduce(x, op, in_place) -> Tensor. As in all moves, the block that releases the GIL uses no
// Python object.
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
    group.reduce_scatter(call, chains(parts(x, dim, sizes)), {out.data_ptr()}, type, op);
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
    group.all_gather(call, whole(x), chains(parts(out, dim, sizes)));
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

// gather_into(x, outs): writes every rank's x into `outs`, which must be contiguous.
PyObject* gather_into(Group& group, Arguments arguments) {
  const Tensor x = plain(arguments[0]);
  const std::vector<Tensor> outs = tensors(arguments[1], group);
  const pybind11::gil_scoped_release free;
  group.all_gather(call_of(Kind::all_gather, x, false), whole(x), chains(wholes(outs)));
  return Py_None;
}

// all_to_all_into(pieces, outs, exchanging): sends pieces[k] to rank k and receives outs[k] from
// rank k. `outs` must be contiguous.
PyObject* all_to_all_into(Group& group, Arguments arguments) {
  const std::vector<Tensor> pieces = tensors(arguments[0], group);
  const std::vector<Tensor> outs = tensors(arguments[1], group);
  // The pieces of an exchange may differ in dtype, so they are sent as bytes.
  const Kind kind = arguments[2] == Py_True ? Kind::exchange : Kind::all_to_all;
  const Call call = kind == Kind::exchange ? Call{kind} : call_of(kind, pieces[0], false);
  const pybind11::gil_scoped_release free;
  group.all_to_all(call, wholes(pieces), wholes(outs));
  return Py_None;
}

// broadcast(x, shape, dtype, source) -> Tensor: x of member `source`; the other members' x is not
// read.
PyObject* broadcast(Group& group, Arguments arguments) {
  const at::ScalarType type = dtype(arguments[2]);
  const int source = source_of(arguments[3], group);
  const Tensor out = empty(integers(arguments[1]), type);
  const Tensor x = source == group.me() ? plain(arguments[0]) : Tensor();
  const Call call = call_broadcast(out, source, group);
  {
    const pybind11::gil_scoped_release free;
    const bool fits = !x.defined() || (x.sizes() == out.sizes() && x.scalar_type() == type);
    if (!fits) {  // exchanges headers first, or the others would wait for this rank, which raises
      group.check(call_of(Kind::broadcast, x), Sizes(group.size()), Sizes(group.size()));
      throw std::invalid_argument("x does not have the shape and dtype that were promised");
    }
    group.broadcast(call, source, x.defined() ? x.data_ptr() : nullptr, out.data_ptr(),
                    int64_t(out.nbytes()));
  }
  return given(out);
}

// gather_objects(bytes) -> list of every rank's bytes.
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

// stage(x) -> every rank's x, as tensors in shared memory, which may be read until unstage(). They
// do not own the memory.
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

// refuse(): makes all members raise in their current call, since this one has no memory for it.
PyObject* refuse(Group& group, Arguments) {
  const pybind11::gil_scoped_release free;
  group.refuse(group.steps());
}

// unlink(): removes the names of the segments; called after all ranks have mapped them.
PyObject* unlink(Group& group, Arguments) {
  group.unlink();
  return Py_None;
}

// room() -> the most bytes that stage() accepts.
PyObject* room(Group& group, Arguments) { return PyLong_FromLongLong(group.room()); }

// grow(name, bytes) -> name: makes room for `bytes` bytes, in a new segment if `name` is None, else
// in the segment of that name, which another rank has created.
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

// shrink(): undoes grow(); stage() then accepts what fits in a slot.
PyObject* shrink(Group& group, Arguments) {
  group.set_bulk(std::nullopt, 0);
  return Py_None;
}

// waiting() -> (seconds, thread, call, steps of all members) of the thread that sleeps in a call,
// or None.
PyObject* waiting(Group& group, Arguments) {
  const auto found = group.waiting();
  if (!found) return Py_None;
  std::string steps;
  for (const uint64_t step : found->steps)
    steps += (steps.empty() ? "" : ", ") + std::to_string(step);
  return Py_BuildValue("dkss", found->sleeper.seconds, found->sleeper.thread, found->call.c_str(),
                       steps.c_str());
}

// set_one_shot(bytes, narrow): see Group::set_one_shot.
PyObject* set_one_shot(Group& group, Arguments arguments) {
  group.set_one_shot(integer(arguments[0]), integer(arguments[1]));
  return Py_None;
}

}  // namespace consistent::peer
