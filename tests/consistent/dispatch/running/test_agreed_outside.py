"""Ranks outside a placement raise what its values make an op raise, at the same call."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S
from mirrored.transports.counting import counting
from mirrored.transports.default import current
from tests.consistent.dispatch.running.raising import CASES
from tests.consistent.dispatch.running.test_agreed import on_every_rank_alike, raised
from tests.mirrored.kinds import run
from tests.ranks import ALL, on_ranks

F = torch.nn.functional
# Of a world of three ranks; one rank alone, and two whose order is not that of their numbers.
PLACES = ([1], [2, 0], [1, 2])


def _each_op(rank: int, first: int) -> None:
    """In one of the places in turn, or in every place with CONSISTENT_TEST_ALL=1."""
    for (number, case), (turn, place) in itertools.product(enumerate(CASES), enumerate(PLACES)):
        if not ALL and (number + first) % len(PLACES) != turn:
            continue
        placement = Placement("cpu", place)
        expected = raised(lambda c=case: c.run(*c.given(True)))
        for is_bad in (False, True, False):
            pairs = zip(case.given(is_bad), case.sbp, strict=True)
            given = [consistent.distribute(x.clone(), placement, sbp) for x, sbp in pairs]
            mine = raised(lambda c=case, given=given: c.run(*given))
            assert (mine is None) != is_bad, (case, placement, mine)
            on_every_rank_alike((case.name, mine))
            assert not is_bad or (expected and mine and mine[0] == expected[0]), (case, mine)
            assert mine is None or mine[1].count("met this in its part of the values") <= 1


@pytest.mark.parametrize(("first", "where"), [(0, "gloo"), (1, "shared memory")])
def test_each_op_raises_on_all_ranks_of_the_world(first: int, where: str) -> None:
    run(where, _each_op, 3, first)


@on_ranks(3)
def test_an_op_on_a_part_of_the_world_tells_once_and_other_ops_do_not(rank: int) -> None:
    pair, world = Placement("cpu", [1, 2]), Placement("cpu", [0, 1, 2])
    table, index = torch.randn(6, 4), torch.arange(6)
    for placement, count in ((pair, 1), (world, 1)):
        x = consistent.distribute(table, placement, B)
        i = consistent.distribute(index, placement, S(0))
        with counting() as sent:
            torch.relu(x) * 2 @ x.t()
        assert not sent.calls
        with counting() as sent:
            F.embedding(i, x)
        assert [call.name for call in sent.calls] == ["gather_objects"] * count


def _trained(step_of: Any, places: list[Any] | None) -> list[Any]:
    """Losses and weights of a net on two placements, and of one process (None). Of batch 1 an index
    is out of range in the first one, of batch 3 a label in the second one; both are left out."""

    def laid(x: torch.Tensor, at: int, sbp: Any) -> Any:
        return x if places is None else consistent.distribute(x, Placement("cpu", places[at]), sbp)

    values = torch.arange(20.0, dtype=torch.float64)
    table = laid(values.view(5, 4).sin(), 0, B).requires_grad_()
    weight = laid((values.view(4, 5) + 1).cos(), 1, S(1)).requires_grad_()
    optimizer = torch.optim.SGD([table, weight], lr=0.1)

    def step(ids: Any, labels: Any) -> Any:
        optimizer.zero_grad()
        x = torch.tanh(F.embedding(ids, table))
        x = x if places is None else x.to_global(placement=weight.placement, sbp=B)
        loss = F.cross_entropy(x @ weight, labels)
        loss.backward()
        optimizer.step()
        return loss

    run, found = step_of(step), []
    for number in range(6):
        ids, labels = torch.arange(7).add(number) % 5, torch.arange(7).mul(number + 1) % 5
        ids[-1] += 9 * (number == 1)
        labels[-1] += 9 * (number == 3)
        try:
            found.append(run(laid(ids, 0, S(0)), laid(labels, 1, S(0))).item())
        except IndexError:
            found.append("left out")
    weights = [w.detach() if places is None else w.detach().full() for w in (table, weight)]
    return [*found, *(w.sum().item() for w in weights)]


# Two placements each that share a rank, share all, share none; of three ranks.
PAIRS = ([[1, 2], [0, 1]], [[0, 1], [1, 2]], [[0], [1, 2]], [[2], [1]], [[0, 2], [0, 1, 2]])


def _caught(rank: int) -> None:
    expected = _trained(lambda step: step, None)
    assert [i for i, loss in enumerate(expected) if loss == "left out"] == [1, 3]
    for places in PAIRS:
        found = _trained(lambda step: step, places)
        on_every_rank_alike(found)
        assert found == pytest.approx(expected), places


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_a_program_over_placements_that_share_ranks_leaves_batches_out(where: str) -> None:
    run(where, _caught, 3)


@pytest.mark.parametrize("backend", ["ops", *(["inductor"] if ALL else [])])
@on_ranks(3, timeout=300)
def test_a_compiled_step_over_placements_leaves_out_the_same(rank: int, backend: str) -> None:
    expected = _trained(lambda step: step, None)
    for places in (PAIRS[0], PAIRS[2]):
        made: list[Any] = []
        found = _trained(
            lambda s, m=made: m.append(consistent.compile(s, backend=backend)) or m[0], places
        )
        on_every_rank_alike(found)
        assert found[:6] == pytest.approx(expected[:6]), places
        assert all(program.why is None for program in made[0].programs), made[0].programs


@on_ranks(4)
def test_placements_of_half_the_world_each_raise_on_all_of_it(rank: int) -> None:
    halves = [Placement("cpu", [0, 1]), Placement("cpu", [2, 3])]
    matrices = torch.eye(3).repeat(4, 1, 1)
    matrices[-1] = 0
    for placement in halves:
        x = consistent.distribute(matrices, placement, S(0))
        mine = raised(lambda x=x: torch.linalg.inv(x))
        assert mine is not None and mine[0] == "_LinAlgError"
        on_every_rank_alike(mine)
        assert current().gather_objects(x.sum().item(), (0, 1, 2, 3)) == [9.0] * 4
