"""What one rank's shard makes an op raise, every rank raises at the same call, and goes on in
step."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from consistent.dispatch.plans.plan import clear_plans
from consistent.rules.raising import OPS
from consistent.spec.tracer import Tracer
from mirrored.transports.counting import counting
from mirrored.transports.default import current
from tests.consistent.dispatch.running.raising import CASES, LEFT_OUT, Case
from tests.mirrored.kinds import run
from tests.ranks import ON_ONE_AXIS, on_ranks

# Ops of which what decides is whole on every rank, or so small here that it is gathered; torch's
# own kernels crash or hang on values that these two refuse.
ALIKE = {
    *("multinomial", "poisson", "quantile", "nanquantile", "repeat_interleave", "index_reduce"),
    *("put", "index_copy", "index_fill", "setitem", "embedding_bag", "norm"),
}
CRASH = {"linalg_eigvals", "binomial"}


def raised(call: Callable[[], Any]) -> tuple[str, str] | None:
    """The class and the text of what ``call`` raises."""
    try:
        call()
    except Exception as error:
        return type(error).__name__, str(error)
    return None


def on_every_rank_alike(mine: Any) -> None:
    """Fail unless all ranks give the same."""
    every = current().gather_objects(mine, tuple(range(current().size)))
    assert all(each == every[0] for each in every), every


def laid(case: Case, is_bad: bool) -> list[Any]:
    """The global tensors of a case."""
    placement = consistent.placement("cpu", range(current().size))
    pairs = zip(case.given(is_bad), case.sbp, strict=True)
    return [consistent.distribute(x.clone(), placement, sbp) for x, sbp in pairs]


@contextmanager
def planned() -> Iterator[list[Any]]:
    """The plans that are made inside."""
    made: list[Any] = []
    clear_plans()
    with Tracer(on_plan=made.append).tracing():
        yield made


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_each_op_raises_on_all_ranks_what_one_shard_makes_it_raise(n: int, where: str) -> None:
    run(where, _each_op_raises, n)


def _each_op_raises(rank: int) -> None:
    checked = set()
    for case in CASES:
        assert raised(lambda c=case: c.run(*c.given(False))) is None, case.name
        expected = raised(lambda c=case: c.run(*c.given(True)))
        with planned() as plans:
            fine, refused = laid(case, False), laid(case, True)
            good = raised(lambda c=case, given=fine: c.run(*given))
            mine = raised(lambda c=case, given=refused: c.run(*given))
        assert good is None, (case, good)
        assert expected and mine and mine[0] == expected[0], (case, mine, expected)
        on_every_rank_alike((case.name, mine))
        assert laid(CASES[0], False)[0].sum().item() == pytest.approx(CASES[0].good[0].sum().item())
        checked |= {plan.name for plan in plans if getattr(plan, "may_differ", False)}
    assert checked == OPS - ALIKE - CRASH - LEFT_OUT


@on_ranks(2)
def test_nothing_is_told_where_what_decides_is_the_same_on_all_ranks(rank: int) -> None:
    placement = consistent.placement("cpu", [0, 1])
    table = consistent.ones(6, 4, placement=placement, sbp=S(1))
    index = consistent.distribute(torch.arange(3), placement, B)
    with planned() as plans:
        _ = (
            torch.nn.functional.embedding(index, table),
            table[index],
            table[0],
            table[torch.arange(2)],
        )
        _ = table // 2, table.long() % 3, table / table, torch.linalg.norm(table)
        _ = torch.linalg.inv(consistent.eye(3, placement=placement, sbp=B))
    assert not [plan for plan in plans if getattr(plan, "may_differ", False)]


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_a_program_that_catches_the_error_goes_on_in_step(n: int, where: str) -> None:
    run(where, _catches, n)


def _catches(rank: int) -> None:
    """A batch that cannot be used is left out on all ranks; jitter helps a factor that fails."""
    size = current().size
    placement = consistent.placement("cpu", range(size))
    losses = []
    for step in range(4):
        target = torch.arange(6) % 4
        target[step] = 9 if step % 2 else 1
        logits = torch.arange(24.0).view(6, 4).cos() + step
        try:
            given = (consistent.distribute(x, placement, S(0)) for x in (logits, target))
            losses.append(torch.nn.functional.cross_entropy(*given).item())
        except IndexError:
            continue
    assert len(losses) == 2
    on_every_rank_alike(losses)
    matrices = torch.eye(3).repeat(size, 1, 1)
    matrices[-1] = 0
    x, tries = consistent.distribute(matrices, placement, S(0)), 0
    while True:
        try:
            factor = torch.linalg.cholesky(x)
            break
        except torch.linalg.LinAlgError:
            x, tries = x + 0.5 * torch.eye(3), tries + 1
    assert tries == 1
    assert torch.equal(factor.full(), torch.linalg.cholesky(matrices + 0.5 * torch.eye(3)))


def _sent_by_a_loss(rank: int, n: int) -> list[tuple[str, int]]:
    placement = consistent.placement("cpu", range(n))
    table = consistent.distribute(torch.randn(5, 4), placement, B)
    index = consistent.distribute(torch.arange(7) % 4, placement, S(0))
    with counting() as sent:
        logits = torch.nn.functional.embedding(index, table)
        torch.nn.functional.cross_entropy(logits, index)
    return [(call.name, call.bytes) for call in sent.calls]


@pytest.mark.parametrize("n", ON_ONE_AXIS)
def test_labels_are_counted_in_the_message_that_tells_of_errors(n: int) -> None:
    """One message for the indices, and one for the labels and their count."""
    found = run("gloo", _sent_by_a_loss, n, n)
    assert found == [[("gather_objects", 0), ("all_reduce", -(-8 * (n - 1) // n))]] * n


@on_ranks(2)
def test_an_op_with_float_divisors_tells_nothing(rank: int) -> None:
    placement = consistent.placement("cpu", [0, 1])
    x = consistent.ones(6, placement=placement, sbp=S(0))
    zeros = x - x
    assert torch.equal((x // zeros).full(), torch.ones(6) // torch.zeros(6))


@on_ranks(4)
def test_all_ranks_of_a_grid_raise_also_those_that_hold_no_part_of_what_fails(rank: int) -> None:
    grid = consistent.placement("cpu", [[0, 1], [2, 3]])
    matrices = torch.eye(3).repeat(3, 1, 1)
    matrices[-1] = 0
    for sbp in ((S(0), B), (B, S(0)), (S(0), S(0))):  # in the last one, a rank has no matrix
        x = consistent.distribute(matrices, grid, sbp)
        mine = raised(lambda x=x: torch.linalg.inv(x))
        assert mine is not None and mine[0] == "_LinAlgError"
        on_every_rank_alike(mine)
        assert x.sum().item() == 6


@on_ranks(3)
def test_ranks_outside_are_told_where_they_wait_for_a_shape(rank: int) -> None:
    pair = consistent.placement("cpu", [0, 1])
    counts = consistent.distribute(torch.tensor([1, 2, 3, -1]), pair, S(0))
    mine = raised(lambda: torch.bincount(counts))
    assert mine is not None
    on_every_rank_alike(mine)
