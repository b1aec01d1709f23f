// Python bindings of leaf.h and waiting.h.

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include "../lookup/key.h"
#include "leaf.h"

namespace consistent::dispatch {
namespace {

const at::Tensor& unpack(PyObject* x) {
  TORCH_CHECK_TYPE(THPVariable_Check(x), "a tensor is needed");
  return THPVariable_Unpack(x);
}

PyObject* set_up_leaves(PyObject*, PyObject* args) {
  Leaves given;
  if (!PyArg_ParseTuple(args, "OOOOOOOOOO", &given.watch, &given.assign, &given.at_once,
                        &given.limit, &given.take, &given.launch, &given.send, &given.settle,
                        &given.finish, &given.shown)) {
    return nullptr;
  }
  for (PyObject* part : {given.watch, given.assign, given.at_once, given.limit, given.take,
                         given.launch, given.send, given.settle, given.finish, given.shown}) {
    Py_INCREF(part);
  }
  leaves = given;
  Py_RETURN_NONE;
}

PyObject* py_gradient(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  if (Py_TYPE(leaf) == global_class()) return gradient(leaf);
  PyErr_Format(PyExc_TypeError, "gradient: a global tensor is needed, not a %s",
               Py_TYPE(leaf)->tp_name);
  return nullptr;
  END_HANDLE_TH_ERRORS
}

PyObject* py_held_gradient(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  unpack(leaf);
  return held_gradient(leaf);
  END_HANDLE_TH_ERRORS
}

PyObject* set_gradient(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *leaf = nullptr, *grad = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &leaf, &grad)) return nullptr;
  unpack(leaf).mutable_grad() = grad == Py_None ? at::Tensor() : unpack(grad);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* assign_gradient(PyObject*, PyObject* const* args, Py_ssize_t count) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(count == 2, "assign_gradient: a leaf and a gradient are needed");
  if (args[1] != Py_None || Backward::current().any()) {
    return PyObject_Vectorcall(leaves.assign, args, count, nullptr);
  }
  unpack(args[0]).mutable_grad().reset();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* watch(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* leaf = nullptr;
  long long bucket = 0, nbytes = 0;
  if (!PyArg_ParseTuple(args, "OLL", &leaf, &bucket, &nbytes)) return nullptr;
  LeafHook::enter(unpack(leaf), bucket, nbytes);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* py_watch_if_leaf(PyObject*, PyObject* tensor) {
  HANDLE_TH_ERRORS
  unpack(tensor);
  if (!watch_if_leaf(tensor)) return nullptr;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* unwatch(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  LeafHook::remove(unpack(leaf));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* is_watched(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(LeafHook::of(unpack(leaf)) != nullptr);
  END_HANDLE_TH_ERRORS
}

PyObject* is_partial(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  const LeafHook* hook = LeafHook::of(unpack(leaf));
  return PyBool_FromLong(hook != nullptr && hook->partial);
  END_HANDLE_TH_ERRORS
}

PyObject* set_partial(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject* leaf = nullptr;
  int value = 0;
  if (!PyArg_ParseTuple(args, "Op", &leaf, &value)) return nullptr;
  if (LeafHook* hook = LeafHook::of(unpack(leaf))) hook->partial = value != 0;
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* set_sync(PyObject*, PyObject* value) {
  const int given = PyObject_IsTrue(value);
  if (given < 0) return nullptr;
  return PyBool_FromLong(std::exchange(Backward::current().sync, given != 0));
}

PyObject* is_synced(PyObject*, PyObject*) { return PyBool_FromLong(Backward::current().sync); }

PyObject* wait(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *leaf = nullptr, *addend = nullptr;
  int replaces = 0;
  if (!PyArg_ParseTuple(args, "OOp", &leaf, &addend, &replaces)) return nullptr;
  const LeafHook* hook = LeafHook::of(unpack(leaf));
  TORCH_CHECK(hook != nullptr && hook->bucket >= 0, "wait: this leaf is not summed over ranks");
  Backward::current().add(unpack(leaf), unpack(addend), *hook, replaces != 0);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* wait_alone(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *leaf = nullptr, *addend = nullptr;
  if (!PyArg_ParseTuple(args, "OO", &leaf, &addend)) return nullptr;
  const LeafHook* hook = LeafHook::of(unpack(leaf));
  TORCH_CHECK(hook != nullptr && hook->bucket >= 0, "wait: this leaf is not summed over ranks");
  Backward::current().add_alone(unpack(leaf), unpack(addend), *hook);
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* hold(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *leaf = nullptr, *addend = nullptr;
  long long bucket = 0, nbytes = 0;
  if (!PyArg_ParseTuple(args, "OOLL", &leaf, &addend, &bucket, &nbytes)) return nullptr;
  return PyLong_FromSize_t(Backward::current().hold(unpack(leaf), unpack(addend), bucket, nbytes));
  END_HANDLE_TH_ERRORS
}

PyObject* launch_if_full(PyObject*, PyObject* bucket) {
  HANDLE_TH_ERRORS
  Backward::current().launch_if_full(integer_in(bucket));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* let_go(PyObject*, PyObject* position) {
  HANDLE_TH_ERRORS
  Backward::current().let_go(integer_in(position));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* take_back(PyObject*, PyObject* position) {
  HANDLE_TH_ERRORS
  return PyBool_FromLong(Backward::current().take_back(integer_in(position)));
  END_HANDLE_TH_ERRORS
}

PyObject* launch_all(PyObject*, PyObject*) {
  HANDLE_TH_ERRORS
  Backward::current().launch_all();
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* accumulate(PyObject*, PyObject* args) {
  HANDLE_TH_ERRORS
  PyObject *given = nullptr, *flat = nullptr;
  if (!PyArg_ParseTuple(args, "O!O", &PyList_Type, &given, &flat)) return nullptr;
  std::vector<size_t> positions;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i) {
    positions.push_back(PyLong_AsSize_t(PyList_GET_ITEM(given, i)));
  }
  Backward::current().accumulate(positions, unpack(flat));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* waiting_for(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  THPObjectPtr addends = checked(PyList_New(0)), positions = checked(PyList_New(0));
  Backward& run = Backward::current();
  bool replaces = false;
  for (const Waiting* each : run.of(unpack(leaf))) {
    replaces = replaces || each->replaces;
    THPObjectPtr position = checked(PyLong_FromSize_t(run.position(*each)));
    const bool is_there = each->addend.defined();
    THPObjectPtr addend = is_there ? wrap(each->addend) : THPObjectPtr(Py_NewRef(Py_None));
    if (PyList_Append(addends.get(), addend.get()) != 0) return nullptr;
    if (PyList_Append(positions.get(), position.get()) != 0) return nullptr;
  }
  return Py_BuildValue("(OOO)", addends.get(), replaces ? Py_True : Py_False, positions.get());
  END_HANDLE_TH_ERRORS
}

PyObject* drop_waiting(PyObject*, PyObject* leaf) {
  HANDLE_TH_ERRORS
  Backward::current().drop(unpack(leaf));
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* clear_waiting(PyObject*, PyObject*) {
  Backward::current().clear();
  Py_RETURN_NONE;
}

PyMethodDef functions[] = {
    {"gradient", py_gradient, METH_O, "(leaf) -> its gradient as a global tensor, or None."},
    {"held_gradient", py_held_gradient, METH_O,
     "(leaf) -> the same without what waits for its sum."},
    {"set_gradient", set_gradient, METH_VARARGS,
     "(leaf, gradient or None): set it as it is; in another layout its shard has another shape."},
    {"assign_gradient",
     reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(assign_gradient)), METH_FASTCALL,
     "(leaf, gradient or None): what a user does who sets it."},
    {"watch", watch, METH_VARARGS,
     "(leaf, bucket, nbytes): from now on its gradients are summed over the ranks of `bucket`, "
     "which are none for -1; `nbytes` is alike on all ranks."},
    {"watch_if_leaf", py_watch_if_leaf, METH_O,
     "(tensor): a leaf that asks for gradients is watched; asks nothing of autograd's graph."},
    {"unwatch", unwatch, METH_O, "(leaf): its gradients are added as torch computes them."},
    {"is_watched", is_watched, METH_O, "(leaf) -> whether `watch` was called for it."},
    {"is_partial", is_partial, METH_O,
     "(leaf) -> whether a gradient of it that has no spec yet is an addend."},
    {"set_partial", set_partial, METH_VARARGS, "(leaf, whether so)"},
    {"set_sync", set_sync, METH_O, "(whether this thread sums gradients) -> what it was before."},
    {"is_synced", is_synced, METH_NOARGS, "() -> whether this thread sums gradients."},
    {"wait", wait, METH_VARARGS,
     "(leaf, addend, replaces): the addend waits for its bucket; if it replaces, the sum takes the "
     "place of the gradient that the leaf has."},
    {"wait_alone", wait_alone, METH_VARARGS,
     "(leaf, addend): a large addend, which nobody else writes to, is launched by itself."},
    {"hold", hold, METH_VARARGS,
     "(leaf, addend, bucket, nbytes) -> its position: it waits in `bucket`, or is on its way if "
     "that "
     "is negative; whoever holds it adds the sum."},
    {"launch_if_full", launch_if_full, METH_O, "(bucket): launch it if it has bytes enough."},
    {"let_go", let_go, METH_O, "(position): what was held is on its way."},
    {"take_back", take_back, METH_O,
     "(position) -> whether the sum of what was sent, which is there, is still to be added."},
    {"launch_all", launch_all, METH_NOARGS, "(): give all waiting addends to their buckets."},
    {"accumulate", accumulate, METH_VARARGS,
     "(positions, flat): add the sums of these waiting addends, side by side in `flat`."},
    {"waiting_for", waiting_for, METH_O,
     "(leaf) -> its waiting addends, None for those on their way that are not kept, whether one "
     "replaces, and their positions."},
    {"drop_waiting", drop_waiting, METH_O, "(leaf): what waits for it is not added any more."},
    {"clear_waiting", clear_waiting, METH_NOARGS, "(): nothing waits any more."},
    {"set_up_leaves", set_up_leaves, METH_VARARGS,
     "(watch, assign, at_once, limit, take, launch, send, settle, finish, shown)"},
    {nullptr, nullptr, 0, nullptr},
};

}  // namespace

bool add_leaf_functions(PyObject* module) { return PyModule_AddFunctions(module, functions) == 0; }

}  // namespace consistent::dispatch
