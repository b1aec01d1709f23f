"""Run the same code on plain and on global tensors, and compare what it returns.

A *case* is a function of a ``Laid`` called ``at``: ``at(x, S(0))`` is ``x`` itself for plain torch
and a global tensor for ours.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S
from consistent.spec import Sbp
from tests.consistent.programs.programs import lay
from tests.reference import assert_close

GRIDS = {2: [0, 1], 3: [2, 0, 1], 4: [[0, 1], [2, 3]]}


class Laid:
    """Makes tensors global on ``placement``, or leaves them plain if it is None."""

    def __init__(self, placement: Placement | None):
        self.placement = placement
        self._count = 0

    def __call__(self, x: torch.Tensor, entry: Sbp = B, second: Sbp = B) -> Any:
        """``x`` under ``entry`` on the first axis and ``second`` on the second, if there is one."""
        if self.placement is None:
            return x.clone()
        self._count += 1
        return lay(x, self.placement, (entry, second)[: self.placement.ndim], seed=self._count)

    def leaf(self, x: torch.Tensor, entry: Sbp = B, second: Sbp = B) -> Any:
        """A leaf that requires grad."""
        return self(x, entry, second).requires_grad_()

    def module(self, module: torch.nn.Module, plan: dict | None = None) -> torch.nn.Module:
        """``module`` made global by ``plan``, whose SBPs apply to the first axis."""
        if self.placement is None:
            return module
        axes = self.placement.ndim
        return consistent.parallelize(
            module, self.placement, {k: (v, B)[:axes] for k, v in (plan or {}).items()}
        )


def distinct(layouts: Iterable[tuple[Sbp, ...]], grid: Any) -> list[tuple[Sbp, ...]]:
    """Those of ``layouts`` that differ from all before them on as many axes as ``grid`` has."""
    axes = 2 if isinstance(grid[0], list) else 1
    return list({each[:axes]: each for each in reversed(list(layouts))}.values())[::-1]


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    """The same float64 numbers on every rank."""
    return torch.randn(
        list(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    )


def net(at: Laid) -> tuple[Any, Any, Any]:
    """The leaves of ``x @ w + b``, each in another layout."""
    return (
        at.leaf(randn(5, 4), S(0)),
        at.leaf(randn(4, 3, seed=1), B, S(1)),
        at.leaf(randn(3, seed=2)),
    )


def compare(rank: int, case: Callable[..., Any], ranks: Any, *args: Any) -> None:
    """Raise AssertionError if ``case`` gives another result on global tensors over ``ranks`` than
    on plain ones."""
    torch.manual_seed(0)
    wanted = case(Laid(None), *args)
    torch.manual_seed(0)
    given = case(Laid(Placement("cpu", ranks)), *args)
    assert_same(given, wanted)


def assert_same(given: Any, wanted: Any, where: str = "result", **tolerance: float) -> None:
    """Assert equal structure, and tensors equal in value, shape and dtype. ``tolerance`` is (rtol,
    atol), if not those of the dtype."""
    if isinstance(wanted, torch.Tensor):
        assert isinstance(given, torch.Tensor), f"{where} is {given!r}"
        assert given.shape == wanted.shape and given.dtype == wanted.dtype, (
            f"{where}: {given.shape} {given.dtype}"
        )
        value = (
            given.detach().full() if isinstance(given, consistent.GlobalTensor) else given.detach()
        )
        assert_close(value, wanted.detach(), **tolerance, msg=lambda text: f"{where}: {text}")
    elif isinstance(wanted, dict):
        assert list(given) == list(wanted), f"{where} has {list(given)}, not {list(wanted)}"
        for key in wanted:
            assert_same(given[key], wanted[key], f"{where}[{key!r}]", **tolerance)
    elif isinstance(wanted, list | tuple):
        assert len(given) == len(wanted), f"{where} has {len(given)} items, not {len(wanted)}"
        for i, pair in enumerate(zip(given, wanted, strict=True)):
            assert_same(*pair, f"{where}[{i}]", **tolerance)
    elif isinstance(wanted, float | complex):
        rel, near = tolerance.get("rtol", 1e-9), tolerance.get("atol", 1e-12)
        assert given == pytest.approx(wanted, rel=rel, abs=near), (
            f"{where} is {given!r}, not {wanted!r}"
        )
    else:
        assert given == wanted, f"{where} is {given!r}, not {wanted!r}"
