"""Ops whose sizes are not those of an earlier call with an equal key: ops in place that reshape,
and scales among the floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from consistent import B, P, S
from tests.ranks import ON_ONE_AXIS, on_ranks, pool
from tests.twins import GRIDS, Laid, assert_same, compare, randn

# Each first on sizes that it keeps, then on some that it changes, and back.
IN_PLACE: dict[str, tuple[Callable[[Any], Any], list[tuple[int, ...]]]] = {
    "t_": (lambda x: x.t_(), [(4, 4), (4, 6), (4, 4)]),
    "T.t_": (lambda x: torch.ops.aten.t_(x), [(4, 4), (4, 6), (4, 4)]),
    "squeeze_": (lambda x: x.squeeze_(), [(4, 6), (4, 1), (1, 6), (4, 6)]),
    "squeeze_ a dim": (lambda x: x.squeeze_(1), [(4, 6), (4, 1), (4, 6)]),
    "transpose_": (lambda x: x.transpose_(1, 2), [(4, 5, 5), (4, 5, 3), (4, 5, 5)]),
    "swapdims_": (lambda x: x.swapdims_(-1, -2), [(4, 5, 5), (4, 5, 3), (4, 5, 5)]),
    "swapaxes_": (lambda x: x.swapaxes_(-1, -2), [(4, 5, 5), (4, 5, 3), (4, 5, 5)]),
    "unsqueeze_": (lambda x: x.unsqueeze_(1), [(4, 6), (4, 1), (4, 6)]),
}
SCALED: dict[str, tuple[Callable[[Any, float], Any], tuple[int, ...]]] = {
    "nearest": (lambda x, s: torch.ops.aten.upsample_nearest1d.vec(x, None, [s]), (2, 4, 8)),
    "linear": (lambda x, s: F.interpolate(x, scale_factor=s, mode="linear"), (2, 4, 8)),
    "bilinear": (lambda x, s: F.interpolate(x, scale_factor=s, mode="bilinear"), (2, 4, 8, 4)),
    "recomputed": (
        lambda x, s: F.interpolate(x, scale_factor=s, recompute_scale_factor=True), (2, 4, 8),
    ),
}  # fmt: skip


def _in_place(at: Laid, name: str) -> list[Any]:
    call, sizes = IN_PLACE[name]
    found = []
    for entry in (B, S(0), S(1), P):
        for shape in sizes:
            for _ in range(3):
                x = at(randn(*shape), entry)
                found += [call(x), x, x * 2]
    return found


def _scaled(at: Laid, name: str) -> list[Any]:
    call, shape = SCALED[name]
    scales = (1.5, 1.5, 1.5, 2.5, 2.5, 0.5, 1.5)
    return [call(at(randn(*shape), entry), s) for entry in (B, S(0), S(1), P) for s in scales]


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize("world", ON_ONE_AXIS)
def test_an_op_in_place_that_reshapes_at_some_sizes(name: str, world: int) -> None:
    pool(world).run(compare, _in_place, GRIDS[world], name)


@pytest.mark.parametrize("name", SCALED)
@pytest.mark.filterwarnings("ignore")
def test_a_scale_that_is_a_float(name: str) -> None:
    pool(2).run(compare, _scaled, GRIDS[2], name)


@on_ranks(2)
def test_addends_are_summed_before_autocast_rounds_them(rank: int) -> None:
    import consistent

    placement = consistent.Placement("cpu", [0, 1])
    x, w = randn(6, 8).float(), randn(8, 6, seed=1).float()
    far = 1000 * randn(6, 8, seed=2).float()
    own = x / 2 + far if rank == 0 else x / 2 - far
    given = consistent.from_local(own, placement, P)
    whole = consistent.distribute(w, placement, B)
    for call in (torch.mm, torch.matmul, lambda a, b: a @ b, lambda a, b: F.linear(a, b.t())):
        with torch.autocast("cpu", torch.bfloat16):
            found, wanted = call(given, whole), call(x, w)
        assert_same(found, wanted, rtol=0.02, atol=0.05)
