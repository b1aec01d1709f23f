#include <torch/csrc/utils/pybind.h>

#include <stdexcept>

#include "methods.h"

namespace consistent::peer {
namespace {

// The bytes of a tensor like x that has size `size` in `dim`.
int64_t bytes_with(const Tensor& x, int dim, int64_t size) {
  int64_t bytes = size * x.element_size();
  for (int d = 0; d < int(x.dim()); ++d) bytes *= d == dim ? 1 : x.size(d);
  return bytes;
}

Sizes bytes_of_parts(const Tensor& x, int dim, const Sizes& sizes) {
  Sizes bytes;
  for (const int64_t size : sizes) bytes.push_back(bytes_with(x, dim, size));
  return bytes;
}

PyObject* told(Group& group, const Call& call, const Sizes& sent, const Sizes& due) {
  const pybind11::gil_scoped_release free;
  group.check(call, sent, due);
  return Py_None;
}

PyObject* told_alike(Group& group, const Call& call, const Tensor& x) {
  const Sizes all(group.size(), int64_t(x.nbytes()));
  return told(group, call, all, all);
}

}  // namespace

PyObject* meet_all_reduce(Group& group, Arguments arguments) {
  const Tensor x = tensor(arguments[0]);
  return told_alike(group, call_all_reduce(x, op_of(arguments[1])), x);
}

PyObject* meet_reduce_scatter(Group& group, Arguments arguments) {
  const Tensor x = tensor(arguments[0]);
  const int dim = dim_of(arguments[1], x);
  const Sizes sizes = sizes_of(arguments[2], group);
  const Sizes due(group.size(), bytes_with(x, dim, sizes[group.me()]));
  const Call call = call_reduce_scatter(x, dim, op_of(arguments[3]));
  told(group, call, bytes_of_parts(x, dim, sizes), due);
  need_cut(call, x, dim, sizes);
  return Py_None;
}

PyObject* meet_all_gather(Group& group, Arguments arguments) {
  const Tensor x = tensor(arguments[0]);
  const int dim = dim_of(arguments[1], x);
  const Sizes sent(group.size(), int64_t(x.nbytes()));
  const Sizes due = bytes_of_parts(x, dim, sizes_of(arguments[2], group));
  return told(group, call_all_gather(x, dim), sent, due);
}

PyObject* meet_all_to_all(Group& group, Arguments arguments) {
  const Tensor x = tensor(arguments[0]);
  const int split = dim_of(arguments[1], x), dim = dim_of(arguments[3], x);
  const Sizes cut = sizes_of(arguments[2], group), joined = sizes_of(arguments[4], group);
  need(split != dim, "the dim that is cut is the one that is joined");
  Sizes due;
  for (const int64_t size : joined) {
    int64_t bytes = cut[group.me()] * size * x.element_size();
    for (int d = 0; d < int(x.dim()); ++d) bytes *= d == dim || d == split ? 1 : x.size(d);
    due.push_back(bytes);
  }
  const Call call = call_all_to_all(x, split, dim);
  told(group, call, bytes_of_parts(x, split, cut), due);
  need_cut(call, x, split, cut);
  return Py_None;
}

PyObject* meet_broadcast(Group& group, Arguments arguments) {
  const int source = source_of(arguments[3], group);
  const bool gives = source == group.me();
  const Tensor promised =
      at::empty(integers(arguments[1]), at::device(at::kMeta).dtype(dtype(arguments[2])));
  const Tensor x = gives ? tensor(arguments[0]) : promised;
  Sizes sent(group.size()), due(group.size());
  if (gives) sent.assign(group.size(), int64_t(x.nbytes()));
  due[source] = int64_t(promised.nbytes());
  return told(group, call_broadcast(x, source, group), sent, due);
}

PyObject* meet_peers(Group& group, Arguments arguments) {
  const Tensor x = tensor(arguments[0]);
  return told_alike(group, call_of(Kind::peers, x), x);
}

}  // namespace consistent::peer
