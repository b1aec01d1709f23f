// collect() and reduce(): one rank's part of a move. Before it, every rank has written its tensor,
// contiguously, to the start of its own place, memory that all ranks can read. Both functions also
// take CPU tensors, for tests.
//
// These functions do not synchronize. The caller has put a barrier of the GPUs on the same stream,
// between the writes to the places and these kernels. Without it they would read places that are
// not yet written.

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/utils/pybind.h>

#include <string>

#include "../../peer/device_moves.h"
#include "../stream.h"
#include "methods.h"

namespace consistent::peer {
namespace {

using Places = std::vector<Tensor>;

Rows box_of(const Tensor& memory, int64_t offset, int64_t element, const Sizes& shape, int64_t dim,
            int64_t start, int64_t size) {
  int64_t outer = 1, inner = element;
  for (int64_t d = 0; d < dim; ++d) outer *= shape[d];
  for (int64_t d = dim + 1; d < int64_t(shape.size()); ++d) inner *= shape[d];
  need(0 <= start && 0 <= size && start + size <= shape[dim], "a part goes beyond its dim");
  need(offset + outer * shape[dim] * inner <= int64_t(memory.nbytes()), "a place is too small");
  char* base = static_cast<char*>(memory.data_ptr()) + offset;
  Rows box = cut(base, outer, shape[dim], inner, start, size);
  return box.joined() ? joined(box.base, box.bytes()) : box;
}

void check_out(const Places& places, const Tensor& out, int64_t dim) {
  need(out.is_contiguous() && 0 <= dim && dim < out.dim(), "a contiguous result with the dim");
  for (const Tensor& place : places) {
    need(place.device() == out.device() && place.is_contiguous(), "places are on one device");
  }
}

// Concatenates the ranks' tensors, which have `sizes` in `dim`, along `dim` into `out`. If `split`
// is not negative, each tensor has size `whole` in dim `split`, and `out` gets the part of it that
// begins at `start`.
void collect(const Places& places, const Tensor& out, int64_t dim, const Sizes& sizes,
             int64_t split, int64_t start, int64_t whole) {
  check_out(places, out, dim);
  need(places.size() == sizes.size() && total(sizes) == out.size(dim), "a size for each place");
  need(split < out.dim() && split != dim, "the dim that is cut is another one of the result's");
  Boxes to, from;
  int64_t at = 0;
  for (size_t k = 0; k < places.size(); ++k) {
    Sizes shape = out.sizes().vec();
    to.add(box_of(out, 0, out.element_size(), shape, dim, at, sizes[k]));
    shape[dim] = sizes[k];
    const int64_t cut_dim = split < 0 ? dim : split;
    const int64_t size = shape[cut_dim], first = split < 0 ? 0 : start;
    if (split >= 0) shape[split] = whole;
    from.add(box_of(places[k], 0, out.element_size(), shape, cut_dim, first, size));
    at += sizes[k];
  }
  const c10::OptionalDeviceGuard guard(out.device());
  if (out.is_cuda()) return copy_boxes_cuda(to, from, current_stream(out.device()));
  copy_boxes_cpu(to, from);
}

// `out` = the ranks' tensors, of shape `shape`, combined by `op` in the order of ranks. `out` is
// the part of `dim` that begins at `start`.
void reduce_places(const Places& places, const Sizes& shape, int64_t dim, int64_t start,
                   const Tensor& out, const std::string& op) {
  check_out(places, out, dim);
  need(int64_t(shape.size()) == out.dim() && !places.empty(), "one number of dims");
  const int64_t bytes = out.element_size() / pairs_of(out.scalar_type());
  Sizes numbers = shape;
  numbers.push_back(pairs_of(out.scalar_type()));
  Boxes from;
  for (const Tensor& place : places) {
    from.add(box_of(place, 0, bytes, numbers, dim, start, out.size(dim)));
  }
  need(from.rows[0].bytes() == int64_t(out.nbytes()), "the result has the shape of the part");
  const Type type = type_of(out.scalar_type());
  const Op by = op_of(pybind11::str(op).ptr());
  const c10::OptionalDeviceGuard guard(out.device());
  if (out.is_cuda())
    return reduce_boxes_cuda(out.data_ptr(), from, type, by, current_stream(out.device()));
  reduce_boxes_cpu(out.data_ptr(), from, type, by);
}

}  // namespace

void add_device_moves(PyObject* module) {
  auto made = pybind11::reinterpret_borrow<pybind11::module_>(module);
  made.def("collect", &collect);
  made.def("reduce", &reduce_places);
}

}  // namespace consistent::peer
