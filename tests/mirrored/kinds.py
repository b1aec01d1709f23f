"""The kinds of ranks that every fact about communication is checked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from mirrored.transports.default import replace_current
from mirrored.transports.torch_dist import TorchDist
from tests.ranks import pool, simulate

SIZES = (1, 2, 3, 4)
everywhere = pytest.mark.parametrize("where", ["simulated", "gloo", "shared memory"])

_gloo: list[TorchDist] = []  # one a process, for it holds process groups


def over_gloo(rank: int, fn: Callable[..., Any], *args: Any) -> Any:
    """`fn(rank, *args)` on messages alone, as between hosts."""
    if not _gloo:
        _gloo.append(TorchDist())
    with replace_current(_gloo[0]):  # in all threads, for all of a process make the same plans
        return fn(rank, *args)


def run(where: str, fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """`fn(rank, *args)` on `n` ranks of that kind."""
    if where == "simulated":
        return simulate(fn, n, *args)
    return pool(n).run(over_gloo, fn, *args) if where == "gloo" else pool(n).run(fn, *args)
