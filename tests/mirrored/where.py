"""Both kinds of ranks that every fact about communication is checked on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.ranks import pool, simulate

SIZES = (1, 2, 3, 4)
both = pytest.mark.parametrize("where", ["simulated", "gloo"])


def run(where: str, fn: Callable[..., Any], n: int, *args: Any) -> list[Any]:
    """`fn(rank, *args)` on `n` ranks of that kind."""
    return simulate(fn, n, *args) if where == "simulated" else pool(n).run(fn, *args)
