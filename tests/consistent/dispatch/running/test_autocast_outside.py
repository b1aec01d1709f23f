"""Ranks outside a placement give what autocast casts the dtypes that it gives inside.

On simulated ranks, which share torch's database of ops: each process takes seconds to import it.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

import consistent
import tests.samples  # noqa: F401
from benchmarks.coverage_cases import RANDOM, map_tensors, operators, samples_of, tensors_in
from consistent import B, Placement, S
from tests.ranks import simulate


@functools.cache
def casting() -> list[str]:
    """Operators of torch's database that autocast has a kernel for."""
    has, cast = torch._C._dispatch_has_kernel_for_dispatch_key, set[str]()
    for name in torch._C._dispatch_get_all_op_names():
        if has(name, "AutocastCPU"):
            cast.add(name.split(".")[0])
    return [n for n, op in operators().items() if f"aten::{op.aten_name or op.name}" in cast]


def _dtypes(rank: int, names: list[str]) -> list[str]:
    return [fault for name in names for fault in _differences(name)]


def _differences(name: str) -> list[str]:
    op, found = operators()[name], []
    for sample in samples_of(name, 2):
        given = (sample.input, sample.args, sample.kwargs)
        for dtypes in ((torch.float32,), (torch.bfloat16, torch.float32)):
            plain = _cast_in_turn(given, dtypes)
            try:
                with torch.autocast("cpu", torch.bfloat16):
                    wanted = _results(op, plain)
            except Exception:  # noqa: BLE001 - torch itself refuses these dtypes
                continue
            for placement, entry in ((Placement("cpu", [0]), B), (Placement("cpu", [1, 0]), S(0))):
                laid = map_tensors(plain, lambda x, p=placement, e=entry: _laid(x, p, e))
                with torch.autocast("cpu", torch.bfloat16):
                    ours = _results(op, laid)
                if ours != wanted:
                    found.append(f"{name} {dtypes} {placement}: {ours}, not {wanted}")
    return found


def _cast_in_turn(value: Any, dtypes: tuple[torch.dtype, ...]) -> Any:
    count = 0

    def cast(x: torch.Tensor) -> torch.Tensor:
        nonlocal count
        x = x.detach()
        if x.dtype is torch.float32:
            x, count = x.to(dtypes[count % len(dtypes)]), count + 1
        return x.requires_grad_() if x.is_floating_point() else x

    return map_tensors(value, cast)


def _laid(x: torch.Tensor, placement: Placement, entry: Any) -> Any:
    made: Any = consistent.distribute(x.detach(), placement, entry if x.ndim else B)
    return made.requires_grad_() if x.is_floating_point() else made


def _results(op: Any, given: Any) -> list[tuple]:
    x, args, kwargs = given
    out = op.op(x, *args, **kwargs)
    return [(t.dtype, tuple(t.shape)) for t in tensors_in(out)]


@pytest.mark.filterwarnings("ignore")
def test_each_op_has_the_dtypes_that_autocast_gives_inside() -> None:
    names = [n for n in casting() if not RANDOM.search(n)]
    assert len(names) > 70
    faults = simulate(_dtypes, 2, names)
    assert not faults[1], "\n".join(faults[1])
    assert faults[0] == faults[1]
