"""Exchanges in two halves: what ranks of the source send arrives as it would at once."""

from __future__ import annotations

import pytest
import torch

from consistent.movement.between import receive, send
from consistent.movement.run import run
from consistent.movement.world import my_coordinate
from consistent.spec import B, P, Placement, S, TensorSpec
from mirrored.transports.in_process import RankAborted
from tests.ranks import on_ranks, simulate
from tests.reference import scatter, shard_at

FIRST, SECOND = Placement("cpu", [0, 1]), Placement("cpu", [2, 3])


def both(rank: int, src_sbp: tuple, dst_sbp: tuple) -> None:
    src, dst = (
        TensorSpec.of(place, sbp, (5, 6), torch.float64)
        for place, sbp in ((FIRST, src_sbp), (SECOND, dst_sbp))
    )
    whole = torch.arange(30.0, dtype=torch.float64).reshape(5, 6)
    local = torch.empty(src.local_shape(None), dtype=torch.float64, device="meta")
    if my_coordinate(FIRST) is not None:
        local = shard_at(scatter(whole, src), src, rank)
    at_once = run(local, src, dst)
    if rank < 2:
        # The second message is sent before the first is received, under another label.
        for label, x in (("b", local * 2), ("a", local)):
            for handle in send(x, src, dst, label):
                handle.wait()
    else:
        first, second = receive(src, dst, "a"), receive(src, dst, "b")
        assert torch.equal(first(), at_once) and torch.equal(second(), at_once * 2)


WAYS = [((S(0),), (S(0),)), ((B,), (S(1),)), ((P,), (B,)), ((S(1),), (P,)), ((P,), (S(0),))]


@pytest.mark.parametrize("src, dst", WAYS, ids=str)
def test_halves_give_what_the_exchange_gives(src: tuple, dst: tuple) -> None:
    simulate(both, 4, src, dst)


@on_ranks(4)
def test_between_processes(rank: int) -> None:
    for src, dst in WAYS:
        both(rank, src, dst)


def waits_in_vain(rank: int) -> None:
    src, dst = (TensorSpec.of(place, (B,), (2,), torch.float32) for place in (FIRST, SECOND))
    if rank > 1:
        receive(src, dst, "what nobody sends")()


def test_a_message_that_nobody_sends_is_named() -> None:
    with pytest.raises((RuntimeError, RankAborted), match="what nobody sends"):
        simulate(waits_in_vain, 4)
