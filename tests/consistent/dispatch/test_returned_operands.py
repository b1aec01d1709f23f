"""An op that returns its operand itself may give a new tensor on another rank, or the next time."""

from __future__ import annotations

import itertools

import pytest
import torch

import consistent
from consistent import B, Placement, S
from consistent.spec.nested import tensors_in
from tests.ranks import on_ranks, pool
from tests.twins import randn


@on_ranks(1, 2)
def test_contiguous_after_it_had_nothing_to_do(rank: int) -> None:
    p = Placement.all("cpu")
    for sizes in ((4, 6), (6, 4)):  # a plan for all sizes, then one for these
        whole = randn(*sizes)
        for _ in range(4):
            laid = consistent.distribute(whole, p, S(0))
            assert laid.contiguous() is laid
        turned = consistent.distribute(whole.t().contiguous(), p, S(1)).t()
        assert torch.equal(turned.contiguous().full(), whole)


# What leaves an operand alone where it has the sizes asked for, with sizes of which some rank's
# shard has one item in the dim that is expanded.
GIVES_BACK = {
    "broadcast_tensors": (torch.broadcast_tensors, [(5, 1), (4,), (1, 1)]),
    "broadcast_tensors, a row": (torch.broadcast_tensors, [(1, 4), (3, 4)]),
    "meshgrid": (lambda *xs: torch.meshgrid(*xs, indexing="ij"), [(1,), (3,)]),
    "expand_as": (lambda x, y: x.expand_as(y), [(1, 4), (3, 4)]),
    "expand": (lambda x: x.expand(3, -1), [(1, 4)]),
    "broadcast_to": (lambda x: torch.broadcast_to(x, (2, 3, 4)), [(3, 4)]),
    "atleast_2d": (lambda *xs: torch.atleast_2d(xs), [(3,), (3, 4)]),
    "squeeze": (lambda x: x.squeeze(0), [(3, 4)]),
    "reshape": (lambda x: x.reshape(3, 4), [(3, 4)]),
    "to": (lambda x: x.to(torch.float64), [(3, 4)]),
    "hstack": (lambda *xs: torch.hstack(xs), [(3, 1), (3, 2)]),
}


@pytest.mark.parametrize("name", GIVES_BACK)
def test_a_result_has_its_own_spec(name: str) -> None:
    pool(3).run(_has_its_own_spec, name)


def _has_its_own_spec(rank: int, name: str) -> None:
    run, sizes = GIVES_BACK[name]
    p, whole = Placement.all("cpu"), [randn(*each) for each in sizes]
    wanted = tensors_in(run(*whole))
    for entries in itertools.product(*([B, *map(S, range(len(each)))] for each in sizes)):
        for _ in range(2):  # a plan for all sizes, then one for these
            laid = [consistent.distribute(x, p, e) for x, e in zip(whole, entries, strict=True)]
            specs = [x._spec for x in laid]
            made = tensors_in(run(*laid))
            for x, y in zip(made, wanted, strict=True):
                assert x.shape == y.shape and torch.equal(x.full(), y), (entries, x._spec)
            assert [x._spec for x in laid] == specs
