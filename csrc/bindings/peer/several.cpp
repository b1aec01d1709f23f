// Moves of several tensors in one call. The ranks meet as often as for one tensor of the same total
// number of bytes.

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <stdexcept>
#include <string>

#include "methods.h"

namespace consistent::peer {
namespace {

// How the ranks split a tensor, or join it: along `dim`, by `sizes`.
struct Cut {
  int dim;
  Sizes sizes;
};

std::vector<Cut> cuts(const std::vector<Tensor>& xs, PyObject* dims, PyObject* sizes,
                      const Group& group) {
  const Sizes given = integers(dims);
  need(given.size() == xs.size() && PyList_Check(sizes) &&
           PyList_GET_SIZE(sizes) == Py_ssize_t(xs.size()),
       "a dim and sizes for each tensor are needed");
  std::vector<Cut> found;
  for (size_t i = 0; i < xs.size(); ++i) {
    need(-xs[i].dim() <= given[i] && given[i] < xs[i].dim(), "the tensor has no such dim");
    const int64_t dim = given[i] < 0 ? given[i] + xs[i].dim() : given[i];
    found.push_back({int(dim), sizes_of(PyList_GET_ITEM(sizes, Py_ssize_t(i)), group)});
  }
  return found;
}

// The numbers that are equal on all ranks: the dims, the ranks' sizes along them, and the sizes of
// the other dims. The headers compare a hash of them.
Sizes known(const std::vector<Tensor>& xs, const std::vector<Cut>& cuts) {
  Sizes numbers;
  for (size_t i = 0; i < xs.size(); ++i) {
    numbers.push_back(xs[i].dim());
    numbers.push_back(cuts[i].dim);
    numbers.insert(numbers.end(), cuts[i].sizes.begin(), cuts[i].sizes.end());
    for (int d = 0; d < int(xs[i].dim()); ++d) {
      numbers.push_back(d == cuts[i].dim ? -1 : xs[i].size(d));
    }
  }
  return numbers;
}

Sizes resized(const Tensor& x, int dim, int64_t size) {
  Sizes shape = x.sizes().vec();
  shape[dim] = size;
  return shape;
}

// Throws if the size of a tensor along its dim is not size(cut). Before it throws, it exchanges
// headers, so that the other ranks raise too instead of waiting for this one.
template <typename Size>
void check_sizes(Group& group, const Call& call, const std::vector<Tensor>& xs,
                 const std::vector<Cut>& cuts, Size size) {
  for (size_t i = 0; i < xs.size(); ++i) {
    if (xs[i].size(cuts[i].dim) == size(cuts[i])) continue;
    {
      const pybind11::gil_scoped_release free;
      group.check(call, Sizes(group.size()), Sizes(group.size()));
    }
    throw std::invalid_argument("tensor " + std::to_string(i) + " has size " +
                                std::to_string(xs[i].size(cuts[i].dim)) + " in its dim, not " +
                                std::to_string(size(cuts[i])) + ", in " + call.text());
  }
}

// For each rank, its parts of all tensors of `xs`.
std::vector<Chain> by_rank(const std::vector<Tensor>& xs, const std::vector<Cut>& cuts,
                           const Group& group) {
  std::vector<Chain> chains(group.size());
  for (size_t i = 0; i < xs.size(); ++i) {
    const std::vector<Rows> own = parts(xs[i], cuts[i].dim, cuts[i].sizes);
    for (int k = 0; k < group.size(); ++k) chains[k].boxes.push_back(own[k]);
  }
  return chains;
}

PyObject* list_of(const std::vector<Tensor>& xs) {
  pybind11::list list;
  for (const Tensor& x : xs) {
    list.append(pybind11::reinterpret_steal<pybind11::object>(THPVariable_Wrap(x)));
  }
  return list.release().ptr();
}

}  // namespace

// reduce_scatter_several(xs, dims, sizes, op) -> list of tensors.
PyObject* reduce_scatter_several(Group& group, Arguments arguments) {
  const std::vector<Tensor> xs = alike(arguments[0]);
  const std::vector<Cut> found = cuts(xs, arguments[1], arguments[2], group);
  const Op op = op_of(arguments[3]);
  const Type type = type_of(xs[0].scalar_type());
  Call call = call_several(Kind::reduce_scatter_several, xs, known(xs, found));
  call.op = int(op);
  std::vector<Tensor> outs;
  std::vector<void*> places;
  check_sizes(group, call, xs, found, [](const Cut& cut) { return total(cut.sizes); });
  for (size_t i = 0; i < xs.size(); ++i) {
    const Sizes shape = resized(xs[i], found[i].dim, found[i].sizes[group.me()]);
    outs.push_back(empty(shape, xs[i].scalar_type()));
    places.push_back(outs[i].data_ptr());
  }
  {
    const pybind11::gil_scoped_release free;
    group.reduce_scatter(call, by_rank(xs, found, group), places, type, op);
  }
  return list_of(outs);
}

// all_gather_several(xs, dims, sizes, outs or None) -> list of tensors.
PyObject* all_gather_several(Group& group, Arguments arguments) {
  const std::vector<Tensor> xs = alike(arguments[0]);
  const std::vector<Cut> found = cuts(xs, arguments[1], arguments[2], group);
  const Call call = call_several(Kind::all_gather_several, xs, known(xs, found));
  const bool given = arguments[3] != Py_None;
  need(!given ||
           (PyList_Check(arguments[3]) && PyList_GET_SIZE(arguments[3]) == Py_ssize_t(xs.size())),
       "a result for each tensor is needed");
  check_sizes(group, call, xs, found, [&](const Cut& cut) { return cut.sizes[group.me()]; });
  std::vector<Tensor> outs;
  Chain mine;
  for (size_t i = 0; i < xs.size(); ++i) {
    const Sizes shape = resized(xs[i], found[i].dim, total(found[i].sizes));
    outs.push_back(given ? tensor(PyList_GET_ITEM(arguments[3], Py_ssize_t(i)))
                         : empty(shape, xs[i].scalar_type()));
    need(outs[i].is_contiguous() && outs[i].sizes() == at::IntArrayRef(shape) &&
             outs[i].scalar_type() == xs[i].scalar_type() && outs[i].device().is_cpu(),
         "a result is contiguous and has the joined shape");
    mine.boxes.push_back(joined(xs[i].data_ptr(), int64_t(xs[i].nbytes())));
  }
  {
    const pybind11::gil_scoped_release free;
    group.all_gather(call, mine, by_rank(outs, found, group));
  }
  return list_of(outs);
}

}  // namespace consistent::peer
