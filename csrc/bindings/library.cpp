// All op schemas of the native library, and the module that Python imports to load it.
//
// Each random op ends with the same arguments: the seed, the op counter, and where the local tensor
// lies in the logical one (its first index in each dim, and the logical sizes).

#include <Python.h>
#include <torch/library.h>

#define CONSISTENT_WHERE "int seed, SymInt counter, SymInt[] starts, SymInt[] logical_sizes"
#define CONSISTENT_FILL(name, parameters) \
  m.def(name "(Tensor(a!) self, " parameters ", " CONSISTENT_WHERE ") -> ()")

TORCH_LIBRARY(consistent, m) {
  CONSISTENT_FILL("uniform_", "float low, float high");
  CONSISTENT_FILL("normal_", "float mean, float std");
  CONSISTENT_FILL("log_normal_", "float mean, float std");
  CONSISTENT_FILL("exponential_", "float rate");
  CONSISTENT_FILL("cauchy_", "float median, float scale");
  CONSISTENT_FILL("geometric_", "float p");
  CONSISTENT_FILL("bernoulli_", "float p");
  CONSISTENT_FILL("bernoulli_tensor_", "Tensor p");
  CONSISTENT_FILL("randint_", "int low, int high");
  m.def("dropout(Tensor x, float p, " CONSISTENT_WHERE ") -> Tensor");
  m.def("randperm(int n, int seed, SymInt counter, *, Device? device=None) -> Tensor");

  m.def(
      "split_cross_entropy(Tensor logits, Tensor target, Tensor? weight, int dim, int start, "
      "bool smooth) -> Tensor");
  m.def(
      "split_cross_entropy_backward(Tensor logits, Tensor target, Tensor rows, Tensor? weight, "
      "int dim, int start) -> Tensor");

  m.def("masked_embedding(Tensor table, Tensor index, int start, float scale) -> Tensor");
  m.def(
      "masked_embedding_backward(Tensor gradient, Tensor index, int rows, int start, "
      "int padding_idx, bool by_count, float scale) -> Tensor");

  m.def(
      "reduce_shards(Tensor[] parts, int dim, int start, int size, *, float scale=1, "
      "Tensor? bias=None, Tensor? residual=None, str activation='none', str norm='none', "
      "int normalized=0, Tensor? weight=None, Tensor? norm_bias=None, float eps=1e-5, "
      "bool keep_total=False, ScalarType? dtype=None) -> (Tensor, Tensor)");

  m.def("streamed_copy_(Tensor(a!) self, Tensor source) -> ()");
}

// The module is empty: importing consistent.forms.native._C loads the library, which registers the
// ops in torch.ops.consistent.
PyMODINIT_FUNC PyInit__C(void) {
  static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr};
  return PyModule_Create(&module);
}
