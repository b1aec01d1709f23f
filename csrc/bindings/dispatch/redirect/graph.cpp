#include "graph.h"

#include <torch/csrc/autograd/functions/accumulate_grad.h>
#include <torch/csrc/autograd/python_variable.h>

#include <cstring>
#include <string>
#include <typeinfo>
#include <unordered_set>
#include <vector>

#include "../lookup/key.h"

namespace consistent::dispatch {
namespace {

using torch::autograd::AccumulateGrad;
using torch::autograd::Node;

// The names of this library's autograd nodes that communicate, from consistent/movement/boxed.py
// and differentiable.py.
constexpr const char* kMoving[] = {"_BoxBackward",  "_SpreadBackward", "_GatherBackward",
                                   "_LandBackward", "_SwapBackward",   "_SumOverBackward"};

// Whether the node is written in Python. Nodes in C++ demangle a name on each call of name(), which
// is slow, so only the names of Python nodes are read.
bool is_python(const Node& node) {
  static const std::type_info* known = nullptr;
  const std::type_info& type = typeid(node);
  if (known != nullptr) return type == *known;
  const char* name = type.name();
  const size_t length = std::strlen(name);
  if (length < 7 || std::strcmp(name + length - 7, "PyNodeE") != 0) return false;
  known = &type;
  return true;
}

bool moves(const Node& node) {
  const std::string name = node.name();
  for (const char* ours : kMoving) {
    if (name == ours) return true;
  }
  return false;
}

bool is_global_leaf(const AccumulateGrad& node) {
  if (!node.variable.defined()) return false;
  PyObject* leaf = THPVariable_Wrap(node.variable);
  const bool ours = leaf != nullptr && Py_TYPE(leaf) == global_class();
  Py_XDECREF(leaf);
  return ours;
}

bool is_global(const Node& node) {
  if (typeid(node) == typeid(AccumulateGrad)) {
    return is_global_leaf(static_cast<const AccumulateGrad&>(node));
  }
  return is_python(node) && moves(node);
}

void add_root(PyObject* root, std::vector<Node*>* found) {
  if (!THPVariable_Check(root)) return;  // a GradientEdge, which global tensors do not provide
  const at::Tensor& x = THPVariable_Unpack(root);
  if (x.grad_fn()) found->push_back(x.grad_fn().get());
}

}  // namespace

bool reaches_global(PyObject* roots) {
  std::vector<Node*> waiting;
  if (PyTuple_Check(roots) || PyList_Check(roots)) {
    for (Py_ssize_t i = 0; i < PySequence_Fast_GET_SIZE(roots); ++i) {
      add_root(PySequence_Fast_GET_ITEM(roots, i), &waiting);
    }
  } else {
    add_root(roots, &waiting);
  }
  std::unordered_set<Node*> seen(waiting.begin(), waiting.end());
  while (!waiting.empty()) {
    Node* node = waiting.back();
    waiting.pop_back();
    if (is_global(*node)) return true;
    for (const auto& edge : node->next_edges()) {
      Node* next = edge.function.get();
      if (next != nullptr && seen.insert(next).second) waiting.push_back(next);
    }
  }
  return false;
}

}  // namespace consistent::dispatch
