"""Which ops of torch's own table of samples refuse values in backward.

An op refuses values if, of two calls that differ in values alone, backward raises in one and not in
the other. An op that raises in all of them has no such derivative, or none for these settings.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils._pytree import tree_leaves, tree_map

import tests.samples  # noqa: F401

# What operands are filled with. The samples' own indices are mostly different ones: products refuse
# zeros that meet at one index.
VALUES = {"own": None, "zeros": 0.0, "equal": 0.5, "NaN": float("nan"), "zeros at one index": 0.0}
GRADIENTS = (0.0, 1.0, float("nan"))
# Torch's second backward of these reads outside of memory where a point of the grid is NaN.
CRASH_FOR_NAN = {"nn.functional.grid_sample", "grid_sampler_2d"}


def refusing() -> dict[str, set[str]]:
    """The texts of the errors, by the names of the ops that refuse values."""
    found: dict[str, set[str]] = {}
    for op in (op for op in op_db if op.supports_autograd):
        kinds = [k for k in VALUES if k != "NaN" or op.name not in CRASH_FOR_NAN]
        for dtype in {torch.float64, torch.complex128} & set(op.supported_dtypes("cpu")):
            for sample in _samples(op, dtype):
                for said in _stages(sample, op.op, kinds):
                    if len(set(said)) > 1:
                        found.setdefault(op.name, set()).update(set(said) - {""})
    return found


def _samples(op: Any, dtype: torch.dtype) -> Iterator[Any]:
    """Up to 40 samples that differ in more than sizes and values."""
    seen: set[str] = set()
    for sample in op.sample_inputs("cpu", dtype):
        given = sample.input, list(sample.args), dict(sample.kwargs)
        alike = repr(tree_map(_without_values, given))
        if alike not in seen and len(seen) < 40:
            seen.add(alike)
            yield sample


def _without_values(x: Any) -> Any:
    """Of tensors what decides the way of backward, of which some are empty or have one item."""
    return tuple(min(n, 2) for n in x.shape) if isinstance(x, torch.Tensor) else x


def _stages(sample: Any, run: Any, kinds: list[str]) -> tuple[list[str], ...]:
    """What backward, backward with its own graph and the second backward raise, "" for nothing:
    each time that they run."""
    first: list[str] = []
    with_graph: list[str] = []
    second: list[str] = []
    for outs, leaves in _calls(sample, run, kinds):
        for value in GRADIENTS:
            again: list[Any] = []
            first.append(_said(outs, leaves, value))
            with_graph.append(_said(outs, leaves, value, again))
            second += [_said(again, leaves, each) for each in GRADIENTS if again]
    return first, with_graph, second


def _calls(sample: Any, run: Any, kinds: list[str]) -> Iterator[tuple[list[Any], list[Any]]]:
    """(results, leaves) with operands of each kind, of which forward refuses none."""
    given = sample.input, list(sample.args), dict(sample.kwargs)
    for kind in kinds:
        first, args, kwargs = tree_map(lambda x, k=kind: _filled(x, k), given)
        try:
            made = run(first, *args, **kwargs)
        except Exception:  # noqa: BLE001, S112  (forward refuses them)
            continue
        outs, leaves = _tracked(made), _tracked((first, args, kwargs))
        if outs and leaves:
            yield outs, leaves


def _tracked(values: Any) -> list[Any]:
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor) and x.requires_grad]


def _filled(x: Any, kind: str) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    value, is_index = VALUES[kind], x.dtype is torch.int64
    if not (x.is_floating_point() or x.is_complex()):
        return torch.zeros_like(x) if is_index and kind == "zeros at one index" else x
    if x.layout is torch.strided and value is not None:
        x = torch.full_like(x, value)
    return x.detach().clone().requires_grad_()


def _said(outs: list[Any], leaves: list[Any], value: float, again: list[Any] | None = None) -> str:
    """What backward of ``outs`` raises, given gradients of ``value``; ``again`` takes its results,
    with their graph."""
    try:
        given = [torch.full_like(x, value) for x in outs]
        found = torch.autograd.grad(
            outs,
            leaves,
            given,
            allow_unused=True,
            retain_graph=True,
            create_graph=again is not None,
        )
    except Exception as error:  # noqa: BLE001  (of any class)
        return str(error)
    if again is not None:
        again += _tracked([x for x in found if x is not None])
    return ""
