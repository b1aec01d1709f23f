"""Calls whose sizes the hook has worked out are right too while it leaves them to Python: under a
report, and while views are alive that boxing has moved."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from tests.ranks import in_turn, pool
from tests.twins import GRIDS, Laid, compare, randn

SIZED: dict[str, Callable[[Any], Any]] = {
    "expand": lambda x: x.expand(3, 2, 6, 4),
    "expand, sizes in a tuple": lambda x: x.expand((3, -1, 6, -1)),
    "broadcast_to": lambda x: torch.broadcast_to(x, (3, 2, 6, 4)),
    "view": lambda x: x.view(2, 6, 2, 2),
    "view, sizes in a tuple": lambda x: x.view((2, 3, 2, 4)),
    "reshape": lambda x: x.reshape(2, 24),
    "reshape, function": lambda x: torch.reshape(x, (2, 3, 8)),
}
LAYOUTS = [(S(0), B), (S(1), B), (S(0), S(1)), (B, S(2)), (B, B)]


def _met_again(at: Laid, name: str, how: str) -> list[Any]:
    found = []
    for layout in LAYOUTS:
        x = at(randn(2, 6, 4), *layout)
        for _ in range(4):  # planned, found for all sizes, met again, found at once
            found.append(SIZED[name](x))
        base = at(randn(6, 4), S(0))
        moved = base.view(4, 6) if how == "a moved view is alive" else None
        with consistent.report() if how == "a report is open" else nullcontext():
            found += [SIZED[name](x) for _ in range(2)]
        found += [SIZED[name](x), moved]
    return found


@pytest.mark.parametrize("how", ["a report is open", "a moved view is alive"])
@pytest.mark.parametrize("name", SIZED)
def test_equals_plain_torch(name: str, how: str) -> None:
    for world in in_turn(list(SIZED).index(name) + (how == "a report is open")):
        pool(world).run(compare, _met_again, GRIDS[world], name, how)
