"""one_hot reads no value, and refuses what torch refuses, in torch's words."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks

SBPS = (S(0), S(1), B)


class Reads(TorchDispatchMode):
    """Counts the values that ops return to Python."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten._local_scalar_dense.default
        return func(*args, **(kwargs or {}))


def error_of(x: Tensor, count: int) -> str:
    try:
        F.one_hot(x, count)
    except RuntimeError as error:
        return str(error).partition("\n")[0]
    return ""


@on_ranks(2, 3)
def test_values_are_torchs_and_none_is_read(rank: int) -> None:
    line, x = Placement.all("cpu"), torch.arange(24).view(6, 4) % 5
    for sbp in SBPS:
        there = consistent.distribute(x, line, sbp)
        for count in (5, 8):
            with Reads() as reads:
                made = F.one_hot(there, count)
            assert reads.count == 0
            assert torch.equal(made.full(), F.one_hot(x, count))  # type: ignore[attr-defined]
            none = F.one_hot(there[:0], count)
            assert none.shape == (0, 4, count) and none.dtype == torch.int64
        assert torch.equal(F.one_hot(there).full(), F.one_hot(x))  # type: ignore[attr-defined]


@on_ranks(2)
@pytest.mark.parametrize("count", [4, 3, 0, -2])
def test_errors_are_torchs(rank: int, count: int) -> None:
    line, x = Placement.all("cpu"), torch.arange(24).view(6, 4) % 5
    for given in (x, x - 1, x.int(), x.float(), x[:0]):
        for sbp in SBPS:
            found = error_of(consistent.distribute(given, line, sbp), count)
            assert found == error_of(given, count), (given, count, sbp)
