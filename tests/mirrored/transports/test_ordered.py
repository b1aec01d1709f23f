"""Calls in the background and those of the program come in the order in which both were made."""

from __future__ import annotations

import torch

from mirrored.transports.default import current, replace_current, wrap_current
from mirrored.transports.ordered import Ordered
from tests.ranks import on_ranks

RANKS = (0, 1)


@on_ranks(2)
def test_calls_wait_for_those_in_the_background(rank: int) -> None:
    with replace_current(current()):
        transport, seen = wrap_current(Ordered), []
        assert isinstance(transport, Ordered) and current() is transport

        def slow() -> torch.Tensor:
            torch.ones(200_000).cumsum(0)
            seen.append("background")
            return current().all_reduce(torch.ones(2), RANKS)

        made = transport.submit(slow)
        total = transport.all_reduce(torch.full((2,), 3.0), RANKS)
        seen.append("program")
        assert seen == ["background", "program"]
        assert total.tolist() == [6.0, 6.0] and made.result().tolist() == [2.0, 2.0]


@on_ranks(2)
def test_who_asks_for_a_result_is_told_of_its_error(rank: int) -> None:
    with replace_current(current()):
        transport = wrap_current(Ordered)
        assert isinstance(transport, Ordered)
        made = transport.submit(int, "no number")
        assert transport.all_reduce(torch.ones(1), RANKS).item() == 2
        assert isinstance(made.exception(), ValueError)
