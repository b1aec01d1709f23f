"""Drawn programs over placements that share ranks: what is made, moved, computed and caught on some
ranks, then on others that overlap with them, has the values and gradients of one process."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, P, Placement, S
from consistent.dispatch.plans.plan import plans
from tests.mirrored.kinds import over_gloo, run
from tests.ranks import ALL, pool
from tests.twins import assert_same, randn

F = torch.nn.functional
PLACES: dict[int, tuple[Any, ...]] = {
    3: ([0, 1], [1, 2], [0, 1, 2], [0, 2], [2, 1], [1]),
    4: ([0, 1], [1, 2], [3, 2, 1, 0], [0, 2, 3], [3], [[0, 1], [2, 3]], [[3, 0]]),
}
SIZE = (7, 4)
STEPS = 25


class Program:
    """One that is drawn from ``seed``; on plain tensors if there are no ``places``."""

    def __init__(self, seed: int, places: tuple[Any, ...] | None, count: int) -> None:
        self.draw, self.places, self.count = random.Random(seed), places, count
        self.live: list[Any] = []
        self.leaves: list[Any] = []
        self.found: list[Any] = []

    def run(self) -> list[Any]:
        kinds = (self.make, self.move, self.move, self.alone, self.join, self.look_up, self.solve)
        self.make()
        for _ in range(STEPS):
            self.draw.choice((*kinds, self.read, self.backward))()
        self.backward()
        return self.found

    def laid(self, call: Callable[..., Any], ndim: int, *entries: Any) -> Any:
        """``call(placement, sbp)``, both drawn; None of plain tensors."""
        where = self.draw.randrange(self.count)
        drawn = [self.draw.choice((B, *map(S, range(ndim)), *entries)) for _ in range(2)]
        if self.places is None:
            return None
        placement = Placement("cpu", self.places[where])
        return call(placement, tuple(drawn[: placement.ndim]))

    def put(self, x: torch.Tensor) -> Any:
        made = self.laid(lambda p, sbp: consistent.distribute(x, p, sbp), x.ndim)
        return x.clone() if made is None else made

    def beside(self, x: Any, y: Any) -> Any:
        """``y`` on the placement of ``x``."""
        return y if self.places is None else y.to_global(placement=x.placement, sbp=x.sbp)

    def any(self) -> Any:
        return self.draw.choice(self.live)

    # -- steps -------------------------------------------------------------------------------------

    def make(self) -> None:
        x = self.put(randn(*SIZE, seed=self.draw.randrange(99))).requires_grad_()
        self.leaves.append(x)
        self.live.append(x * 1)

    def move(self) -> None:
        x = self.any()
        moved = self.laid(lambda p, sbp: x.to_global(placement=p, sbp=sbp), 2, P)
        self.live.append(x if moved is None else moved)

    def alone(self) -> None:
        ops = (
            torch.tanh,
            lambda x: x.softmax(self.draw.randrange(2)),
            lambda x: x.cumsum(0) / 4,
            lambda x: x - x.mean(0),
            lambda x: x.flip(0)[x.abs().sum(1).argsort()],
        )
        self.live.append(self.draw.choice(ops)(self.any()))

    def join(self) -> None:
        x = self.any()
        y = self.beside(x, self.any())
        self.live.append(torch.tanh(self.draw.choice((lambda: x * y - x, lambda: x @ y.t() @ y))()))

    def look_up(self) -> None:
        """An index is out of range in every third one."""
        x, index = self.any(), torch.tensor([self.draw.randrange(7) for _ in range(7)])
        index[self.draw.randrange(7)] += 9 * (self.draw.random() < 0.34)
        entry = self.draw.choice((B, S(0)))
        if self.places is not None:
            index = consistent.distribute(index, x.placement, (entry,) * x.placement.ndim)
        call = self.draw.choice((lambda: F.embedding(index, x), lambda: x[index]))
        self.tried(call, IndexError)

    def solve(self) -> None:
        """The matrix is singular in every third one."""
        x = self.any()
        square = (x.t() @ x + 1) * (self.draw.random() > 0.34)
        self.tried(lambda: torch.linalg.solve(square, x.t()).t().tanh(), torch.linalg.LinAlgError)

    def tried(self, call: Callable[[], Any], error: type[Exception]) -> None:
        try:
            self.live.append(call())
        except error:
            self.found.append(error.__name__)

    def read(self) -> None:
        self.found.append(self.any().abs().mean().item())

    def backward(self) -> None:
        self.draw.choice([x for x in self.live if x.requires_grad]).square().mean().backward()
        self.found += [x.grad for x in self.leaves]
        self.live, self.leaves = [x.detach() for x in self.live[-3:]], []
        self.make()


class Forgetful(Program):
    """One whose rank forgets all plans now and then, at times of its own."""

    def __init__(self, seed: int, places: tuple[Any, ...], rank: int) -> None:
        super().__init__(seed, places, len(places))
        self.forgets = random.Random(1000 * seed + rank)

    def any(self) -> Any:
        if self.forgets.random() < 0.3:
            plans.clear()
        return super().any()


def _programs(rank: int, n: int, seeds: range) -> None:
    places = PLACES[n]
    for seed in seeds:
        wanted = Program(seed, None, len(places)).run()
        assert_same(Program(seed, places, len(places)).run(), wanted, rtol=1e-6, atol=1e-8)


def _forgetful(rank: int, n: int, seed: int) -> list[Any]:
    return Forgetful(seed, PLACES[n], rank).run()


def _with_others_plans(rank: int, n: int, seeds: range) -> None:
    for seed in seeds:
        wanted = Program(seed, None, len(PLACES[n])).run()
        # Each with plans that were made for the other.
        for found in (_forgetful(rank, n, seed), over_gloo(rank, _forgetful, n, seed)):
            assert_same(found, wanted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
@pytest.mark.parametrize("n", PLACES)
def test_programs_over_placements_that_share_ranks(n: int, where: str) -> None:
    run(where, _programs, n, n, range(200 if ALL else 3))


@pytest.mark.parametrize("n", PLACES)
def test_a_rank_may_forget_its_plans_at_any_time(n: int) -> None:
    """Its table may be full when those of others are not. Plans that are made again are the same,
    so that all ranks still send the same."""
    pool(n).run(_with_others_plans, n, range(100, 200 if ALL else 102))


def test_the_programs_catch_errors_and_ask_for_gradients() -> None:
    for count in map(len, PLACES.values()):
        found = [x for seed in range(4) for x in Program(seed, None, count).run()]
        kinds = {x if isinstance(x, str) else type(x).__name__ for x in found}
        assert kinds == {"IndexError", "_LinAlgError", "float", "Tensor", "NoneType"}, kinds
