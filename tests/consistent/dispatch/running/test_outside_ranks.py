"""Ranks outside a placement: every op's shapes and graph, forward and backward, without a value."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

import consistent
from consistent import B, GlobalTensor, Placement, S
from consistent.dispatch.planning.functions.torch_functions import resolve
from consistent.rules import find
from consistent.spec import Sbp
from mirrored import use
from mirrored.transports.in_process import InProcess, InProcessState
from tests.brute_force import Example
from tests.consistent.rules.corpus import FAMILIES
from tests.ranks import ALL


def follow(case: Example, sbp: Sbp) -> list[Any]:
    """``case`` as rank 0 sees it where ranks 1 and 2 run it; gradients of what requires one."""
    placement = Placement("cpu", [1, 2])

    def laid(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        y = consistent.distribute(x.detach(), placement, sbp if x.ndim else B)
        continuous = x.dtype.is_floating_point or x.dtype.is_complex
        return y.requires_grad_() * 1 if continuous else y

    args, kwargs = tree_map(laid, (case.args, case.kwargs))
    out = case.func(*args, **kwargs)
    found = [x for x in tree_leaves(out) if isinstance(x, GlobalTensor)]
    if resolve(case.func).inplace:
        found.append(args[0])
    tracked = [x for x in found if x.requires_grad]
    if tracked:
        sum((x.abs() if x.is_complex() else x).sum() for x in tracked).backward()
    return found


class _FromNobody(InProcess):
    def gather_notes(self, note: bytes, ranks: tuple[int, ...]) -> list[bytes]:
        return [b""] * len(ranks)  # no rank has met an error


@pytest.fixture
def outside() -> Any:
    """Rank 0 of 3, whose other ranks never answer: whatever it asks them raises, but for whether
    they have met an error."""
    world = InProcessState(3)
    world.finished = {1, 2}
    with use(_FromNobody(world, 0)):
        yield


@pytest.mark.parametrize("sbp", [B, S(0)], ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_an_op_is_followed_alone(family: str, sbp: Sbp, outside: None) -> None:
    # What lies whole is followed as what is split, but for the choice of signatures and forms.
    for case in FAMILIES[family][:: 1 if ALL or sbp.is_split else 8]:
        try:
            found = follow(case, sbp)
        except RuntimeError as error:
            # Torch does not differentiate every operand, such as a running mean.
            if "is not differentiable" in str(error):
                continue
            # The rule says that the data decides how long the result is, so that it must be told.
            row = find(resolve(case.func).name)
            if "nobody will send" in str(error) and row is not None and row.outs is not None:
                continue
            raise AssertionError(f"{case}: {error}") from error
        for x in found:
            with torch._C.DisableTorchFunctionSubclass():
                held = tuple(torch.Tensor.size(x))
            assert x.to_local().numel() == 0 and held == x._spec.local_shape(None), case
