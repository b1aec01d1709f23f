"""Writes docs/ops.md: for every op that torch names, how it runs; for every row, its rule and the
signatures that follow. `python docs/make_ops.py`."""

from __future__ import annotations

import importlib
import inspect
import sys
import textwrap
import types
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from consistent.dispatch import _C
from consistent.dispatch.planning.functions.questions import VALUE_READING_OPS, computes_tensors
from consistent.dispatch.planning.functions.torch_functions import handler_name, resolve
from consistent.dispatch.plans.plan import handlers, list_ops
from consistent.forms import FORMS
from consistent.rules import table
from consistent.rules.table import Row
from consistent.tensor.global_tensor import GlobalTensor
from consistent.tensor.inspection import answers
from tests.brute_force import Called, Example

# Calls that plain torch runs on dense CPU tensors and this library refuses, with the reason; the
# errors say what to call instead.
RAISES = {
    "`x.resize_`, `x.resize_as_` to another shape, `x.as_strided_`": "the logical shape is part "
    "of the spec, and other tensors may be views of this one",
    "`x.data_ptr()`, `x.untyped_storage()`, `x.__dlpack__()`, ...": "they return one memory, and "
    "no rank's memory has the whole tensor: [inspection.md](inspection.md)",
    "`op(..., out=y)` with `y` of another shape": "torch would resize `y`: see `resize_` above",
    "writing to `x.numpy()` if no rank has all of `x`": "the array is a copy",
    "`x.t_()`, `x.unsqueeze_()`, ... if `x` requires grad": "the autograd history of `x` keeps "
    "the old spec",
    "in-place writes to a view that boxing had to copy": "the write would not reach the view's "
    "base",
    "writing a global tensor to a plain one that requires grad": "a plain tensor's autograd "
    "history cannot hold global tensors",
    "`torch.Tensor(x)`, `torch.from_dlpack`, `plain.data = x`, ...": "they read the memory of one "
    "rank; `x.full()` or `x.to_local()` says which value is meant",
    "`torch.vmap`, `torch.func.*`, `autograd.grad(is_grads_batched=True)`": "they bypass the hook "
    "(`__torch_function__`) and would transform this rank's shard; `torch.autograd.grad` works, "
    "also repeatedly",
    "`torch.distributed` collectives": "use boxing (redistribution) instead: "
    "`x.to_global(sbp=...)`",
    "`copy.deepcopy` of a tensor with autograd history": "as in torch: only leaf tensors can be "
    "deep-copied",
}

ASKED = {*answers.LOGICAL, *answers.OF_SHARD, *answers.REFUSED}


def rules_of(row: Row) -> list[str]:
    """Return the rules in the notation, one a line; or the docstring of the rule's function."""
    if row.rules:
        return [f"* `{rule}`" for rule in row.rules]
    paragraphs = (inspect.getdoc(row.rule) or "").split("\n\n")
    words = [each for each in paragraphs if not each.startswith(("```", "Args:", "Raises:"))]
    return [" ".join(" ".join(words).split())]


def examples() -> dict[int, list[Example]]:
    """The examples of each row, by its id, as the tests prove them."""
    found: dict[int, list[Example]] = defaultdict(list)
    folder = importlib.import_module("tests.consistent.rules.examples")
    for path in sorted(Path(folder.__path__[0]).glob("*.py")):
        module = importlib.import_module(f"{folder.__name__}.{path.stem}")
        for case in getattr(module, "EXAMPLES", ()):
            found[id(table.find_row(resolve(case.func).name))].append(case)
    return found


def derived(case: Example) -> tuple[str, list[str]]:
    """The call of an example, and the signatures that its row gives it on two ranks."""
    called = Called(case.func, case.args, case.kwargs, 2)
    return repr(called), [repr(made) for made in called.signatures(0)]


def section(row: Row, cases: Sequence[Example]) -> str:
    """A row: its names, its rule, and the signatures of the example that has most of them."""
    first, *rest = row.names.split()
    called, made = max(map(derived, cases), key=lambda pair: len(pair[1]), default=("", []))
    lines = [f"### {first}", ""]
    if rest:
        also = " ".join(f"`{name}`" for name in rest)
        lines += [*textwrap.wrap(f"Also {also}.", 100), ""]
    for rule in rules_of(row):
        lines += [rule] if row.rules else textwrap.wrap(rule, 100)
    if not made:  # the tests of its forms prove it
        return "\n".join(lines)
    lines += ["", "```", *textwrap.wrap(called, 98, subsequent_indent="    ")]
    lines += [f"  {signature}" for signature in made]
    return "\n".join([*lines, "```"])


def rows() -> list[Row]:
    """Every row once, by its first name."""
    return sorted({id(row): row for row in table.ROWS.values()}.values(), key=lambda r: r.names)


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
    """Return (how the function runs, a link to its row)."""
    own = vars(GlobalTensor).get(name) if place == "Tensor" else None
    if own is not None and not isinstance(own, _C.Method):  # a `_C.Method` just calls the op
        return "own", ""
    if isinstance(function, types.MethodWrapperType):
        return "property", ""
    if name in answers.PARTS:
        return "whole", ""
    if handler_name(name) in handlers:
        return "asked" if place == "Tensor" and name in ASKED else "own", ""
    known = resolve(function)
    if known.kind == "open":
        return "opened", ""
    return how_named(known.name)


def how_named(name: str) -> tuple[str, str]:
    """Return the same for the name of an op."""
    if name.startswith(tuple(list_ops)):
        return "list", ""
    row = table.find_row(name)
    if row is None:
        asked = name in ASKED or not (
            computes_tensors(name) or computes_tensors(f"{name}_") or name in VALUE_READING_OPS
        )
        return "asked" if asked else "whole", ""
    first = row.names.split()[0]
    return "row", f"[{first}](#{first})"


def aten_names() -> set[str]:
    """Names of all aten ops, in-place ones by their functional name."""
    full = (n.partition(".")[0] for n in torch._C._dispatch_get_all_op_names())
    names = {name.removeprefix("aten::") for name in full if name.startswith("aten::")}
    return {name.rstrip("_") or name for name in names if not name.startswith("__")}


def collected() -> dict[str, dict[tuple[str, str], list[str]]]:
    """Return name -> (how, link to the row) -> the namespaces of such functions."""
    found: dict[str, dict[tuple[str, str], list[str]]] = defaultdict(lambda: defaultdict(list))
    met: set[str] = set()
    for place, name, function in overridable():
        if not isinstance(function, types.MethodWrapperType):
            met.add(resolve(function).name)
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
    "row": "the op has a row in the table of rules: of the layouts that its rule allows, the "
    "cheapest is used",
    "opened": "a composition of other ops: its body runs on global tensors, and each op in it runs "
    "as this table says",
    "list": "a foreach or fused op on lists of tensors: one call, if at each position all lists "
    "have the same layout, else one call per position",
    "own": "a method of `GlobalTensor`, which returns the value of the logical tensor",
    "asked": "a query, which computes no tensor: answered without communication, or refused "
    "([inspection.md](inspection.md))",
    "property": "read from the spec (placement, SBP, shape, dtype) or from the shard",
    "whole": "no row: inputs are boxed (gathered) to B and every rank runs the op on them; "
    "correct, but it moves data",
}


_HEAD = """# Ops

How each op of torch {version} runs on global tensors: all of
`torch.overrides.get_overridable_functions()` and all of aten. Written by `python docs/make_ops.py`.

| how | number of names | meaning |
| --- | --- | --- |
{kinds}

{rows} rows have the rules, {notation} of them in the notation of `adding_an_op.md`, the others as
functions. {forms} forms (implementations on shards) serve ops that cannot just run on each shard.
Custom ops (`torch.library`) run as *whole* above, and so do ops that torch may add in the future.

## What raises although plain torch runs it

| call | why |
| --- | --- |
{raises}

## What the hook cannot see

A function of a C++ extension that accepts `at::Tensor` and is only bound by pybind
(`m.def("f", &f)`) does not go through torch's hook: it gets this rank's shard, computes on it, and
returns a plain tensor. If it is registered with `TORCH_LIBRARY(name, m)` or
`torch.library.custom_op`, it runs as *whole* above. Or pass `x.full()`, or `x.to_local()` for the
shard.

## Every op

The second column has the namespace: `torch`, `Tensor` (a method; *in place* with a trailing
underscore), `F`, `fft`, `linalg`, `special`, or `aten` if the op is only there. "How" is explained
in the first table.

| op | where | how | row |
| --- | --- | --- | --- |
{ops}

## Every row

Each row with its names, its rule, and the signatures (layouts of operands and results) that follow
for an example on an axis of two ranks. If a row has several rules, the first that matches is used.

{sections}
"""


def version() -> str:
    """Of torch, without the build."""
    return torch.__version__.partition("+")[0]


def page() -> str:
    """The whole document."""
    found, cases = collected(), examples()
    counts = {
        kind: sum(any(k == kind for k, _ in ways) for ways in found.values()) for kind in KINDS
    }
    return _HEAD.format(
        version=version(),
        kinds="\n".join(f"| {kind} | {counts[kind]} | {KINDS[kind]} |" for kind in KINDS),
        rows=len(rows()),
        notation=sum(row.is_notation for row in rows()),
        forms=len(FORMS),
        raises="\n".join(f"| {call} | {why} |" for call, why in RAISES.items()),
        ops="\n".join(
            f"| `{name}` | {', '.join(places)} | {kind} | {row} |"
            for name in sorted(found)
            for (kind, row), places in found[name].items()
        ),
        sections="\n\n".join(section(row, cases[id(row)]) for row in rows()),
    )


def main() -> None:
    warnings.simplefilter("ignore")
    Path(__file__).with_name("ops.md").write_text(page())


if __name__ == "__main__":
    main()
