"""What one rank's values make the backward of an op raise, every rank raises at the same call, and
goes on in step."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from consistent.rules.raising import IN_BACKWARD
from mirrored.transports.default import current
from tests.consistent.dispatch.running.refusing import REFUSALS, Refusal
from tests.consistent.dispatch.running.test_agreed import on_every_rank_alike, raised
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, on_ranks, pool

pytestmark = pytest.mark.filterwarnings("ignore")

# As torch's table of samples names them.
BY_VALUE = {
    *("linalg.eig", "linalg.eigh", "linalg.eigvals", "linalg.eigvalsh", "linalg.svd", "svd"),
    *("linalg.svdvals", "linalg.cond", "linalg.det", "norm", "linalg.norm", "linalg.matrix_norm"),
    *("svd_lowrank", "pca_lowrank", "logdet", "linalg.slogdet", "linalg.solve_ex"),
    *("index_reduce", "scatter_reduce"),
}


# Programs of the ops above.
PROGRAMS = {"svd_lowrank", "pca_lowrank"}


def _tried(case: Refusal, placement: Any, sbp: Any, is_bad: bool) -> tuple[Any, Any]:
    """The gradient, whole, and what was raised in its stead."""
    x = consistent.distribute(case.values(is_bad), placement, sbp).requires_grad_()
    found = []
    said = raised(lambda: found.append(case.gradient(x, case.weight(is_bad))))
    return found[0].full() if found and not is_bad else None, said


def _check(case: Refusal, placement: Any, sbp: Any) -> None:
    """It refuses what one process refuses, on all ranks alike, and is right before and after."""
    good = case.gradient(case.values(False).requires_grad_(), case.weight(False))
    wrong = case.values(True).requires_grad_()
    expected = raised(lambda: case.gradient(wrong, case.weight(True)))
    for is_bad in (False, True, False):
        found, said = _tried(case, placement, sbp, is_bad)
        on_every_rank_alike((case.name, sbp, said))
        if is_bad:
            assert expected and said and said[0] == expected[0], (case, sbp, said)
            assert said[1].split("(Batch")[0].startswith(expected[1].split("(Batch")[0])
        else:
            torch.testing.assert_close(found, good)


def _each(rank: int) -> None:
    """Each case with its values split; whole ones too, of every second case by default."""
    placement = consistent.placement("cpu", range(current().size))
    for number, case in enumerate(REFUSALS):
        for sbp in (S(0), B) if ALL or number % 2 else (S(0),):
            _check(case, placement, sbp)


@on_ranks(2, 3)
def test_each_op_raises_in_backward_on_all_ranks_what_one_shard_makes_it_raise(rank: int) -> None:
    assert {case.name for case in REFUSALS} == IN_BACKWARD | PROGRAMS
    _each(rank)


@pytest.mark.parametrize("name", ["linalg_eigh", "slogdet", "scatter_reduce"])
def test_the_same_holds_between_hosts_and_of_grids(name: str) -> None:
    pool(2).run(over_gloo, _of_one, name, [0, 1], S(0))
    for sbp in ((S(0), B), (B, S(0)), (S(0), S(0))):
        pool(4).run(_of_one, name, [[0, 1], [2, 3]], sbp)


def _followed(rank: int) -> list[str]:
    case = next(case for case in REFUSALS if case.name == "linalg_eigh")
    placement, said = consistent.placement("cpu", [2, 1]), []
    for is_bad in (False, True):
        x = consistent.distribute(case.values(is_bad), placement, S(0)).requires_grad_()
        said.append(raised(lambda x=x, b=is_bad: case.gradient(x, case.weight(b))))
        said.append(raised(lambda x=x: x.abs().sum().item()))
    return ["" if each is None else each[1] for each in said]


def test_a_rank_outside_takes_no_number_of_another_step_once_backward_was_refused() -> None:
    try:
        found = pool(3).run(_followed)
    finally:
        pool(3).close()
    for rank, said in enumerate(found):
        assert not said[0] and not said[1]
        assert said[2].startswith("linalg_eigh_backward") == (rank > 0)
        assert "a lack of memory or an interrupt that rank" in said[3], found


def _of_one(rank: int, name: str, ranks: Any, sbp: Any) -> None:
    placement = consistent.placement("cpu", ranks)
    _check([case for case in REFUSALS if case.name == name][-1], placement, sbp)


def _trained(step_of: Any) -> list[Any]:
    """Losses of steps of which the third is left out: backward refuses its values."""
    placement = consistent.placement("cpu", range(current().size))
    weight = consistent.distribute(torch.eye(3) * 2, placement, B).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.01)

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = torch.slogdet(x @ weight)[1].clamp(-99, 99).sum()
        (found,) = torch.autograd.grad(loss, weight, create_graph=True)
        (loss + found.square().sum()).backward()
        optimizer.step()
        return loss

    run, losses = step_of(step), []
    for number in range(5):
        x = torch.arange(54.0).view(6, 3, 3).sin() + number
        x[-1] *= number != 2
        try:
            losses.append(run(consistent.distribute(x, placement, S(0))).item())
        except RuntimeError as error:
            losses.append(f"{type(error).__name__} {error}")
    return [*losses, weight.detach().full().sum().item()]


@on_ranks(2, timeout=300)
@pytest.mark.parametrize("backend", ["ops", *(["inductor"] if ALL else [])])
def test_a_compiled_step_leaves_out_what_eager_leaves_out(rank: int, backend: str) -> None:
    made = []
    eager = _trained(lambda step: step)
    compiled = _trained(lambda s: made.append(consistent.compile(s, backend=backend)) or made[0])
    assert [isinstance(x, str) for x in eager] == [i == 2 for i in range(6)], eager
    assert all(program.why is None for program in made[0].programs)
    assert compiled == pytest.approx(eager) and compiled[2] == eager[2]
    on_every_rank_alike(compiled)


@on_ranks(2)
def test_a_compiled_step_looks_at_no_phase_as_torch_does_not(rank: int) -> None:
    case = next(case for case in REFUSALS if case.name == "linalg_eigh")
    placement = consistent.placement("cpu", [0, 1])
    step = consistent.compile(case.gradient, backend="ops")
    for is_bad in (False, False, True, False):
        x = consistent.distribute(case.values(is_bad), placement, S(0)).requires_grad_()
        found = step(x, case.weight(is_bad)).full()
        assert found.isnan()[-1].all() == is_bad and not found[:-1].isnan().any()


def test_every_op_that_refuses_values_has_a_case() -> None:
    names = {case.name for case in REFUSALS}
    assert {name.replace(".", "_") for name in BY_VALUE} <= names


@pytest.mark.skipif(not ALL, reason="two minutes: all samples that torch has of its ops")
def test_no_other_op_of_torch_refuses_values_in_backward() -> None:
    from tests.consistent.dispatch.running.refused_by_torch import refusing

    found = refusing()
    assert set(found) == BY_VALUE, {name: found.get(name) for name in set(found) ^ BY_VALUE}
