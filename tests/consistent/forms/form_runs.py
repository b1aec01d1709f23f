"""Running one form on simulated ranks, on one axis, and counting what it sends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.forms import FORMS, Shards
from consistent.rules import Call, Operand, Out, find_row
from consistent.spec import B, Placement, Sbp, TensorSpec
from mirrored.transports.counting import counting
from tests.brute_force.expected import addends
from tests.ranks import simulate
from tests.reference import cut


def run_form(
    form: str,
    func: Callable[..., Any],
    tensors: tuple[torch.Tensor, ...],
    ins: tuple[Sbp, ...],
    *rest: Any,
    ranks: int = 3,
    out: Sbp = B,
) -> list[tuple[Any, int]]:
    """(what `form` gives for `func(*tensors, *rest)` with tensors in `ins`, bytes it sends) of
    each rank; outputs are in `out`."""
    placement, known = Placement("cpu", range(ranks)), resolve(func)
    specs = tuple(
        TensorSpec.of(placement, (s,), t.shape, t.dtype) for t, s in zip(tensors, ins, strict=True)
    )
    operands = tuple(Operand(i, spec) for i, spec in enumerate(specs))
    call = Call(known.name, (*operands, *rest), {}, operands)
    result = func(*(t.clone() for t in tensors), *rest)
    outs = [
        t
        for t in (result if isinstance(result, tuple) else (result,))
        if isinstance(t, torch.Tensor)
    ]
    call.outs = tuple(Out(t.shape, t.dtype) for t in outs)
    row = find_row(known.name)
    assert row is not None
    row.signatures(call, ranks)
    out_specs = tuple(TensorSpec.of(placement, (out,), t.shape, t.dtype) for t in outs)
    random = torch.Generator().manual_seed(0)
    shards = [cut(t, (s,), (ranks,), random, addends) for t, s in zip(tensors, ins, strict=True)]

    def main(rank: int) -> tuple[Any, int]:
        mine = tuple(s[rank] for s in shards)
        with counting() as log:
            made = FORMS[form](
                Shards(known.run, call, (0,), mine, specs, out_specs, (*mine, *rest), {})
            )
        return made, log.bytes

    return simulate(main, ranks)
