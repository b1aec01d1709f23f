"""An op that returns its operand itself once may give a new tensor the next time."""

from __future__ import annotations

import torch

import consistent
from consistent import Placement, S
from tests.ranks import on_ranks
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
