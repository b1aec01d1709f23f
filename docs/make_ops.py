"""Writes docs/ops.md: for every op that torch names, how it runs. `python docs/make_ops.py`."""

from __future__ import annotations

import inspect
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from consistent.local import FORMS
from consistent.rules import table
from consistent.rules.table import Row
from consistent.tensor import _C
from consistent.tensor.global_tensor import GlobalTensor
from consistent.tensor.naming import know
from consistent.tensor.plan import list_ops

# What plain torch runs on dense CPU tensors and ours refuses, with the reason; the errors say what
# to call instead.
RAISES = {
    "`x.resize_`, `x.resize_as_`, `x.as_strided_`": "the result has another shape, and the logical "
    "shape of a tensor that others may hold views of is part of its spec",
    "`op(..., out=y)` with `y` of another shape": "torch would resize `y`; same reason",
    "`x.t_()`, `x.unsqueeze_()`, ... where `x` requires grad": "a tensor's history keeps its spec",
    "writing into a view that boxing had to copy": "the write would not reach the tensor that it "
    "was taken from",
    "writing a global tensor into a plain one that requires grad": "the plain one's history is not "
    "global",
    "`torch.tensor(x)`, `torch.as_tensor`, `torch.from_dlpack`, ...": "they read the memory of one "
    "rank; `x.full()` or `x.to_local()` says which value is meant",
    "`torch.vmap`, `torch.func.*`, `autograd.grad(is_grads_batched=True)`": "they run past the "
    "hook "
    "and would transform this rank's shard; `torch.autograd.grad` works, any number of times",
    "`torch.distributed` collectives": "boxing is the collective of a global tensor: "
    "`x.to_global(sbp=...)`",
    "`copy.deepcopy` of a result that has history": "as in torch: only leaves are copied deeply",
}


def forms_of(row: Row) -> tuple[str, ...]:
    """Names of the local forms that the row's rule mentions, itself or in functions it calls."""
    # A form may be picked by the name of the op.
    found: set[str] = set(row.names.split()) & set(FORMS)
    seen: set[int] = set()

    def visit(value: Any) -> None:
        if id(value) in seen:
            return
        seen.add(id(value))
        if isinstance(value, str) and value in FORMS:
            found.add(value)
        elif isinstance(value, types.CodeType):
            for part in value.co_consts:
                visit(part)
        elif isinstance(value, types.FunctionType) and "consistent.rules" in value.__module__:
            visit(value.__code__)
            for cell in value.__closure__ or ():
                visit(cell.cell_contents)
            for name in value.__code__.co_names:
                visit(value.__globals__.get(name))
        elif isinstance(value, tuple | list | frozenset):
            for part in value:
                visit(part)
        elif isinstance(value, dict):
            visit(tuple(value.values()))

    visit(row.rule)
    return tuple(sorted(found))


def rule_of(row: Row) -> str:
    """The rule in one line: the notation, or the first line of the function's docstring."""
    if isinstance(row.rule, str):
        return f"`{row.rule}`"
    text = (inspect.getdoc(row.rule) or row.rule.__name__).split("\n")[0]
    return text.replace("|", "\\|")


def overridable() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """(place, name, function) of everything that torch lets a tensor class override."""
    seen: set[tuple[str, str]] = set()
    for namespace, functions in torch.overrides.get_overridable_functions().items():
        for function in functions:
            full = torch.overrides.resolve_name(function) or ""
            if isinstance(namespace, types.ModuleType | type):
                place = namespace.__name__.replace("torch.nn.functional", "F")
                name = full.rpartition(".")[2] or getattr(function, "__name__", "")
            else:  # a property getter
                place, name = "Tensor", full.removesuffix(".__get__").rpartition(".")[2]
            if name and (place, name) not in seen:
                seen.add((place, name))
                yield place, name, function


def how(place: str, name: str, function: Callable[..., Any]) -> tuple[str, str]:
    """(how it runs, its rule)."""
    own = vars(GlobalTensor).get(name) if place == "Tensor" else None
    if own is not None and not isinstance(own, _C.Method):  # which is a short way to the op
        return "own", ""
    if isinstance(function, types.MethodWrapperType):
        return "property", ""
    known = know(function)
    if known.kind == "open":
        return "opened", ""
    return how_named(known.name)


def how_named(name: str) -> tuple[str, str]:
    """The same for the name of an op."""
    if name.startswith(tuple(list_ops)):
        return "list", ""
    row = table.find(name)
    if row is None:
        return "whole", ""
    forms = ", ".join(f"`{form}`" for form in forms_of(row))
    return "row", rule_of(row) + (f"; forms {forms}" if forms else "")


def aten_names() -> set[str]:
    """Names of all aten ops, in-place ones by their functional name."""
    full = (n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names())
    names = {name.removeprefix("aten::") for name in full if name.startswith("aten::")}
    return {name.rstrip("_") or name for name in names if not name.startswith("__")}


def collected() -> dict[str, dict[tuple[str, str], list[str]]]:
    """name -> (how, rule) -> the places where it stands so."""
    found: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    met: set[str] = set()
    for place, name, function in overridable():
        if not isinstance(function, types.MethodWrapperType):
            met.add(know(function).name)
        shown = name if name.startswith("__") else name.rstrip("_") or name
        places = found[shown][how(place, name, function)]
        label = place.removeprefix("torch.") + ("" if shown == name else " in place")
        if label not in places:
            places.append(label)
    for name in aten_names() - met:
        if name not in found:
            found[name][how_named(name)].append("aten")
    return found


KINDS = {
    "row": "the rule gives the layouts that hold; the cheapest is taken",
    "opened": "a composition: its body runs on global tensors and each op in it is chosen for",
    "list": "position by position, in one call where the tensors of a position lie alike",
    "own": "a method of GlobalTensor that answers for the logical tensor",
    "property": "read from the spec, or from the shard",
    "whole": "no row: inputs are boxed to B and every rank runs it; right, but it moves data",
}


_HEAD = """# Ops

How each op of torch {version} runs on global tensors: all of
`torch.overrides.get_overridable_functions()` and all of aten. Written by `python docs/make_ops.py`.

| how | names | meaning |
| --- | --- | --- |
{kinds}

{forms} local forms serve rows whose op on the shards is not the op on the whole. Custom ops
(`torch.library`) run whole, and so does an op that torch adds tomorrow.

## What raises where plain torch runs

| call | why |
| --- | --- |
{raises}

## Every op

Where a name stands: `torch`, `Tensor` (a method; *in place* with a trailing underscore), `F`,
`fft`, `linalg`, `special`, or only among `aten`. Rules are in the notation of `adding_an_op.md`, or
in words.

| op | where | how | rule |
| --- | --- | --- | --- |
{ops}
"""


def version() -> str:
    """Of torch, without the build."""
    return torch.__version__.partition("+")[0]


def page() -> str:
    """The whole document."""
    found = collected()
    counts = {
        kind: sum(any(k == kind for k, _ in ways) for ways in found.values()) for kind in KINDS
    }
    return _HEAD.format(
        version=version(),
        kinds="\n".join(f"| {kind} | {counts[kind]} | {KINDS[kind]} |" for kind in KINDS),
        forms=len(FORMS),
        raises="\n".join(f"| {call} | {why} |" for call, why in RAISES.items()),
        ops="\n".join(
            f"| `{name}` | {', '.join(places)} | {kind} | {rule} |"
            for name in sorted(found)
            for (kind, rule), places in found[name].items()
        ),
    )


def main() -> None:
    warnings.simplefilter("ignore")
    Path(__file__).with_name("ops.md").write_text(page())


if __name__ == "__main__":
    main()
