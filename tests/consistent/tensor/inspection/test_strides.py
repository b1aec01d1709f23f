"""Strides are those of the whole, laid out on one device as the shards are on theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from consistent import B, P, Placement, S
from mirrored.transports.default import current
from tests.alone import alone, laid

# A view of [6, 5, 4] and the dims that it leaves as they are, so that they may be split.
VIEWS: dict[str, tuple[Callable[[Any], Any], tuple[int, ...]]] = {
    "whole": (lambda x: x, (0, 1, 2)),
    "permuted": (lambda x: x.permute(2, 0, 1), (0, 1, 2)),
    "swapped": (lambda x: x.transpose(0, 1), (0, 1, 2)),
    "reversed": (lambda x: x.mT, (0, 1, 2)),
    "every second column": (lambda x: x[..., ::2], (0, 1)),
    "every second row": (lambda x: x[::2], (1, 2)),
    "a part": (lambda x: x[:, 1:4], (0, 2)),
    "one": (lambda x: x[:, 2], (0, 2)),
    "wider": (lambda x: x[None, :, None], (0, 1, 2)),
    "expanded": (lambda x: x[None].expand(3, 6, 5, 4), (0, 1, 2)),
    "made contiguous": (lambda x: x.permute(2, 0, 1).contiguous(), (0, 1, 2)),
    "computed": (lambda x: x.permute(2, 0, 1) * 2, (0, 1, 2)),
    "images": (lambda x: x[None].to(memory_format=torch.channels_last), (0, 1, 2)),
}


def _asked(x: Any) -> tuple:
    images = x.ndim == 4 and x.is_contiguous(memory_format=torch.channels_last)
    return x.stride(), x.is_contiguous(), images, tuple(x.stride(d) for d in range(x.ndim))


@pytest.mark.parametrize("name", VIEWS)
def test_strides_are_those_of_the_whole_on_every_rank(name: str) -> None:
    view, split = VIEWS[name]
    full = torch.randn(6, 5, 4, dtype=torch.float64)
    wanted = _asked(view(full))
    for ranks in ([0, 1], [2, 0, 1], [0, 2]):
        for entry in (*map(S, split), B, P):
            for rank in range(3):
                with alone(rank, 3):
                    x = view(laid(full, Placement("cpu", ranks), (entry,)))
                    assert _asked(x) == wanted, (x._spec, rank)


def test_what_is_contiguous_stays_the_object_that_it_is() -> None:
    full = torch.randn(3, 4, dtype=torch.float64)
    for entry in (S(0), S(1), B, P):
        for rank in range(3):
            with alone(rank, 3):
                x = laid(full, Placement("cpu", [0, 1, 2]), (entry,))
                assert x.contiguous() is x


def test_a_rank_without_a_row_knows_the_order_of_dims() -> None:
    full = torch.randn(2, 4, dtype=torch.float64)
    for rank in range(3):
        with alone(rank, 3):
            x = laid(full, Placement("cpu", [0, 1, 2]), (S(0),))
            assert current().rank == rank and x.to_local().shape == (int(rank < 2), 4)
            assert (x.stride(), x.is_contiguous()) == ((4, 1), True)
            assert (x.t().stride(), x.t().is_contiguous()) == ((1, 4), False)
