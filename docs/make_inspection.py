"""Writes docs/inspection.md: what each attribute of torch.Tensor answers on a global tensor.
`python docs/make_inspection.py`."""

# ruff: noqa: E501 - lines of Markdown

from __future__ import annotations

import inspect
import warnings
from pathlib import Path

import torch

from consistent.dispatch.planning.functions.questions import (
    ONE_MEMORY,
    VALUE_READING_OPS,
    computes_tensors,
)
from consistent.dispatch.planning.functions.torch_functions import handler_name, resolve
from consistent.rules import table
from consistent.tensor.inspection import answers

# The attributes of torch.Tensor that are not ops, by what a global tensor answers. One that torch
# adds stands nowhere here, and a test fails until it does.
READING = """
__array__ __bool__ __complex__ __contains__ __float__ __index__ __int__ __long__ __nonzero__ item
numpy tolist allclose equal is_nonzero
""".split()
SPEC = """
__len__ device dim dtype element_size is_complex is_cpu is_cuda is_floating_point is_meta itemsize
layout nbytes ndim ndimension nelement numel shape size stride type __dlpack_device__
""".split()
VIEWS = "H T data imag mH mT real".split()
AUTOGRAD = """
_backward_hooks _post_accumulate_grad_hooks _version grad grad_fn is_leaf register_hook
register_post_accumulate_grad_hook requires_grad requires_grad_ retain_grad
""".split()
TEXT = "__format__ __repr__ __str__".split()
COPIES = "__deepcopy__ __reduce__ __reduce_ex__".split()
PYTHON = """
__annotations__ __array_priority__ __class__ __delattr__ __delitem__ __dict__ __dir__ __doc__
__getattribute__ __getstate__ __hash__ __init__ __init_subclass__ __module__ __new__ __setattr__
__sizeof__ __firstlineno__ __static_attributes__ __subclasshook__ __torch_dispatch__ __torch_function__ __weakref__
_clear_non_serializable_cached_data
""".split()
OPENED = """
__array_wrap__ __floordiv__ __iter__ __rdiv__ __reversed__ __rfloordiv__ __rlshift__ __rmatmul__
__rmod__ __rpow__ __rrshift__ __rtruediv__ backward eig istft lstsq lu module_load reinforce solve
symeig to_sparse_coo type_as unique unique_consecutive
""".split()
REWRITTEN = "as_strided cpu cuda ipu mtia new resize_ resize_as_ set_ to xpu".split()
HIDDEN = ["__cuda_array_interface__", "__dlpack_c_exchange_api__"]
# Asked of torch and not of the tensor.
FUNCTIONS = ["_debug_has_internal_overlap", "cudnn_is_acceptable"]
FUNCTIONS += ["_has_compatible_shallow_copy_type", "result_type"]

KINDS: dict[str, str] = {
    "reads the value": "**a collective**: every rank must make the call, and all get the value",
    "from the spec": "the logical tensor, from its spec and the order of the shard's strides",
    "logical": "the logical tensor, as one device would have it",
    "this rank's": "that of the shard: the same on all ranks, or about this rank's memory and objects",
    "autograd": "the node, hooks and gradient of this rank, whose graph is the logical one",
    "a view": "a view that moves no data",
    "text": "the value if this rank has all of it, else its shard, marked as a shard; nothing is sent",
    "a copy": "a global tensor of the same layout; a pickle holds this rank's shard",
    "Python's": "about the Python object, as for any tensor",
    "composition": "torch's own Python code runs on global tensors, and each op in it is planned separately",
    "taken over": "this library's own method computes it for the logical tensor, or raises if it cannot",
    "hidden": "`AttributeError`, so that `hasattr` says no",
    "a part": "of a sparse or quantized tensor: runs on gathered inputs; of a dense one raises, and nothing is sent",
    "raises": "raises and says what to call instead, since the answer would be the shard's, not the tensor's",
    "op": "an op with a row (`ops.md`)",
    "whole": "an op without a row: runs whole, as in `ops.md`",
}


def groups() -> dict[str, list[str]]:
    """Kind -> names, of all that is not an op."""
    refused = [name for name in answers.REFUSED if name not in FUNCTIONS]
    this_rank = [*answers.OF_SHARD, *answers.OF_SHARD_PROPERTIES]
    of_autograd = ("_has_grad_dtype_override", "grad_dtype", "output_nr", "retains_grad")
    autograd = [n for n in this_rank if n in of_autograd]
    logical = [*answers.LOGICAL, *answers.LOGICAL_PROPERTIES]
    aliases = ["_grad", "_grad_fn"]
    return {
        "reads the value": READING,
        "from the spec": SPEC,
        "logical": [n for n in logical if n not in aliases and n not in FUNCTIONS],
        "this rank's": [n for n in this_rank if n not in autograd],
        "autograd": AUTOGRAD + autograd + aliases,
        "a view": VIEWS,
        "text": TEXT,
        "a copy": COPIES,
        "Python's": PYTHON,
        "composition": OPENED,
        "taken over": REWRITTEN,
        "hidden": HIDDEN,
        "a part": list(answers.PARTS),
        "raises": refused,
    }


def kind_of(name: str) -> str:
    """Under which kind the attribute ``name`` of torch.Tensor stands; "" where nobody has said."""
    found = [kind for kind, names in groups().items() if name in names]
    assert len(found) < 2, f"{name} is said to be {found}"
    if found:
        return found[0]
    attribute = inspect.getattr_static(torch.Tensor, name)
    if isinstance(attribute, property) or inspect.isgetsetdescriptor(attribute):
        return ""
    if not callable(attribute):
        return ""
    if table.find_row(resolve(getattr(torch.Tensor, name)).name) is not None:
        return "op"
    return (
        "whole"
        if computes_tensors(name) or handler_name(name).rstrip("_") in VALUE_READING_OPS
        else ""
    )


def classified() -> dict[str, list[str]]:
    """Kind -> the names that this torch has."""
    found: dict[str, list[str]] = {kind: [] for kind in [*KINDS, ""]}
    for name in sorted(dir(torch.Tensor)):
        found[kind_of(name)].append(name)
    return found


_HEAD = """# Asking a tensor

What each attribute of `torch.Tensor` (torch {version}) answers on a global tensor. Written by `python docs/make_inspection.py`.

**Only ops, `to_global` and reading a value communicate.** Every other query is answered from the tensor's spec (shape, dtype, placement, SBP) and this rank's shard, or raises. So a single rank may make it.

```
print(x)          tensor([1., 2.], placement=..., sbp=B)                                this rank has all of it
                  tensor(shard of rank 1: [3., 4.], shape=(4,), placement=..., sbp=S(0))
                  tensor(no value on rank 2, shape=(4,), dtype=torch.float32, placement=..., sbp=S(0))
f"{{loss:.3f}}"     2.302                       this rank has it
                  shard of rank 0: 1.151      loss is P, and this rank has an addend
                  (no value on rank 2)
```

There is one exception. If `x` is a view for which boxing (redistribution) had to copy data ([decisions](design/decisions.md)), and its base was modified since, `x.data` and `x.to_local()` compute the view again, and communicate as an op does.

`x.stride()` and `x.is_contiguous()` are those of a dense tensor of the logical shape, with its dims in the shard's memory order. So `x.t()` is not contiguous, as on one device. A view of a split tensor may be a copy, and then is contiguous although on one device it has gaps, such as `x[:, 1:]` under `S(1)`. For the same reason `x.view(sizes)` returns what `x.reshape(sizes)` returns if the strides of the shards allow it, even if those on one device do not. A program may decide by `is_contiguous()` whether to call `contiguous()`, since the answer is correct for the shard. To compute addresses, use the strides of `x.to_local()`.

{counts} attributes are ops: {rows} with a rule ([ops.md](ops.md)), and {whole} without, which run on gathered (replicated) inputs. The others:

| answer | what it is | names |
| --- | --- | --- |
{kinds}

## What raises

A method that a newer torch adds, and that computes no tensor, raises too until this library has an answer for it.

| call | why | instead |
| --- | --- | --- |
{refused}
| `x.resize_(size)`, `x.resize_as_(y)` of another shape | its shape is part of its spec | `x.reshape(size)`, `x.new_empty(size)` |
| `x.set_(storage, ...)` | a storage is one rank's | `x.set_(y)`, `x.data = y`, `x.copy_(y)` |
"""


def version() -> str:
    """Of torch, without the build."""
    return torch.__version__.partition("+")[0]


def page() -> str:
    """The whole document."""
    found = classified()
    ops = (len(found["op"]), len(found["whole"]))
    kinds = [k for k in KINDS if k not in ("op", "whole")]
    return _HEAD.format(
        version=version(),
        counts=sum(ops),
        rows=ops[0],
        whole=ops[1],
        kinds="\n".join(f"| {k} | {KINDS[k]} | {_quoted(found[k])} |" for k in kinds),
        refused="\n".join(_refusals()),
    )


def _quoted(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)


def _refusals() -> list[str]:
    reasons: dict[tuple[str, str], list[str]] = {}
    for name, reason in answers.REFUSED.items():
        reasons.setdefault(reason, []).append(name)
    usual = ONE_MEMORY, "`x.to_local()` for this rank's shard, `x.full()` for the value"
    rows = []
    for (why, instead), names in reasons.items():
        asked = instead.format("NAME(...)") or usual[1]
        rows.append(f"| {_quoted(sorted(names))} | {why or usual[0]} | {asked} |")
    return rows


def main() -> None:
    warnings.simplefilter("ignore")
    Path(__file__).with_name("inspection.md").write_text(page())


if __name__ == "__main__":
    main()
