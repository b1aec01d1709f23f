"""An error that one rank alone meets in backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from mirrored.transports.default import current
from tests.consistent.dispatch.running.test_agreed import on_every_rank_alike, raised
from tests.ranks import close_pools, on_ranks, pool


def _leaf(values: list[float], sbp: Any, ranks: Any = None) -> Any:
    placement = consistent.placement("cpu", range(current().size) if ranks is None else ranks)
    return consistent.distribute(torch.tensor(values), placement, sbp).requires_grad_()


@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
@pytest.mark.filterwarnings("ignore:Anomaly Detection:UserWarning")
@on_ranks(2, 3)
def test_anomaly_mode_raises_on_all_ranks_what_one_has_found(rank: int) -> None:
    values = [1.0, 4.0, 9.0, 2.0, 3.0, 0.0]
    plain = torch.tensor(values, requires_grad=True)
    with torch.autograd.set_detect_anomaly(True):
        expected = raised(lambda: (plain.sqrt() * 0).sum().backward())
        for sbp, ranks in ((S(0), None), (B, None), (S(0), [0]), (S(0), [1, 0]), (B, [1])):
            x = _leaf(values, sbp, ranks)
            mine = raised(lambda x=x: (x.sqrt() * 0).sum().backward())
            assert expected and mine and mine[0] == expected[0]
            assert mine[1].startswith(expected[1]), (mine, expected)
            on_every_rank_alike(mine)
            x.grad = None
            (x * 2).sum().backward()
            assert torch.equal(x.grad.full(), torch.full((6,), 2.0))


def _mixing(rank: int) -> list[str]:
    """What rank 1 leaves out after an error in backward does not become another batch's sum."""
    x, weight = _leaf([1.0, 2.0, 3.0, 4.0], S(0)), _leaf([1.0], B)
    said = []
    x.sum().item()  # a program has communicated before
    for step in range(2 + rank):  # it has left one out
        loss = (x * weight * (step + 1)).sum()
        if rank == 1 and step == 0:
            loss.register_hook(_refuse)
        try:
            loss.backward()
            said.append("summed")
        except ValueError:
            said.append("refused")
        except RuntimeError as error:
            said.append(str(error).partition(" that ")[0])
    return said


def _refuse(_: Any) -> None:
    raise ValueError("this batch is refused")


def test_a_rank_that_has_raised_alone_takes_no_number_of_another_step() -> None:
    close_pools()
    try:
        others, mine = pool(2).run(_mixing)
    finally:
        close_pools()  # these ranks fit no others any more
    assert mine == [
        "refused",
        *["rank 1 has met an error in backward, a lack of memory or an interrupt"] * 2,
    ]
    assert others == ["rank 1 has met an error in backward, a lack of memory or an interrupt"] * 2
