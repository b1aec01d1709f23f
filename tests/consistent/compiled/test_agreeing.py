"""A compiled step raises on every rank what one rank's values make an op raise, and goes on."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import consistent
from consistent import B, S
from mirrored.transports.default import current
from tests.consistent.dispatch.running.raising import CASES
from tests.consistent.dispatch.running.test_agreed import laid, on_every_rank_alike, raised
from tests.ranks import ALL, on_ranks
from tests.torch_release import IS_2_13

# A program cannot hold these; the step then runs as it is written.
NO_PROGRAM = {
    *("bincount", "repeat_interleave", "ctc_loss", "multinomial", "poisson"),
    *("histc", "histogram"),
    *(() if IS_2_13 else ("quantile", "nanquantile")),
}
# A program has the lookup of rows that split bags are added up from, and that has its own error.
ROWS_OF_BAGS = {"embedding_bag": "IndexError"}


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, timeout=900)
@pytest.mark.parametrize("backend", ["ops", *(["inductor"] if ALL else [])])
def test_each_op_raises_on_all_ranks_what_one_shard_makes_it_raise(rank: int, backend: str) -> None:
    for case in CASES:
        step = consistent.compile(lambda *given, c=case: c.run(*given), backend=backend)
        for _ in range(3):
            assert raised(lambda s=step, c=case: s(*laid(c, False))) is None, case.name
        assert (step.programs[-1].why is None) == (case.name not in NO_PROGRAM), case.name
        mine = raised(lambda s=step, c=case: s(*laid(c, True)))
        expected = raised(lambda c=case: c.run(*c.given(True)))
        assert mine and expected, (case, mine, expected)
        # What decides lies whole on every rank: Inductor's kernel checks, and has its own error.
        by_kernel = backend == "inductor" and mine[1].startswith("kernel, ")
        as_torch = mine[0] in (expected[0], ROWS_OF_BAGS.get(case.name))
        assert by_kernel or as_torch, (case, mine, expected)
        # A check that each rank makes by itself names the file of its kernel under Inductor.
        on_every_rank_alike((case.name, mine if backend == "ops" else mine[0]))
        assert raised(lambda s=step, c=case: s(*laid(c, False))) is None, case.name


def _trained(table_sbp: Any, step_of: Callable[..., Any]) -> list[float | str]:
    """Losses of steps, of which the fifth has a token that the table does not have."""
    placement = consistent.placement("cpu", range(current().size))
    table = torch.arange(24.0).view(6, 4).cos()
    weight = consistent.distribute(table, placement, table_sbp).requires_grad_()
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def step(tokens: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(F.embedding(tokens, weight) @ weight.t(), target)
        loss.backward()
        optimizer.step()
        return loss

    run, found = step_of(step), []
    for number in range(7):
        tokens = (torch.arange(6) + number) % 6
        tokens[-1] = 6 if number == 4 else tokens[-1]
        given = [consistent.distribute(x, placement, S(0)) for x in (tokens, tokens.flip(0) % 5)]
        try:
            found.append(round(run(*given).item(), 5))
        except IndexError as error:
            found.append(str(error))
    return found


@pytest.mark.filterwarnings("ignore")
@on_ranks(2, timeout=300)
def test_a_compiled_step_leaves_out_the_batch_that_eager_leaves_out(rank: int) -> None:
    for table_sbp, backend in ((S(0), "ops"), (S(1), "ops"), (B, "inductor")):
        made = partial(consistent.compile, fullgraph=True, backend=backend)
        eager = _trained(table_sbp, lambda step: step)
        compiled = _trained(table_sbp, made)
        assert compiled == eager
        assert [isinstance(x, str) for x in eager] == [i == 4 for i in range(7)]
        on_every_rank_alike(compiled)


@on_ranks(2)
def test_a_loss_tells_by_the_count_that_it_sums(rank: int) -> None:
    placement = consistent.placement("cpu", [0, 1])
    step = consistent.compile(F.cross_entropy, backend="ops", fullgraph=True)
    given = [
        consistent.distribute(x, placement, S(0)) for x in (torch.rand(6, 5), torch.arange(6) % 5)
    ]
    for _ in range(3):
        step(*given)
    assert [call.kind for call in step.programs[-1].program.messages()] == ["attempt", "tell"]


@on_ranks(4)
def test_a_loss_on_a_grid_raises_on_all_ranks_and_goes_on(rank: int) -> None:
    grid = consistent.placement("cpu", [[0, 1], [2, 3]])
    x, target = torch.arange(40.0).view(8, 5).sin(), torch.arange(8) % 5
    for sbp in ((S(0), B), (B, S(0)), (S(0), S(0))):
        step = consistent.compile(lambda x, t: F.cross_entropy(x, t), backend="ops", fullgraph=True)

        def loss(target: torch.Tensor, step: Any = step, sbp: Any = sbp) -> Any:
            return step(*(consistent.distribute(each, grid, sbp) for each in (x, target)))

        wrong = target.index_fill(0, torch.tensor([7]), 5)
        for _ in range(3):
            assert torch.allclose(loss(target).full(), F.cross_entropy(x, target))
        said = raised(lambda loss=loss, wrong=wrong: loss(wrong))
        assert said is not None
        on_every_rank_alike(said)
        assert torch.allclose(loss(target).full(), F.cross_entropy(x, target))
