"""``check=True`` and check mode compare values, however these lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import consistent
from consistent import B, Placement, S
from tests.ranks import on_ranks

WAYS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as made": lambda x: x,
    "transposed": lambda x: x.t(),
    "every other row": lambda x: x[::2],
    "every other column": lambda x: x[:, ::2],
    "one column": lambda x: x[:, 1:2],
    "one row": lambda x: x[1:2],
    "one element with a stride": lambda x: x.flatten()[::2][:1],
    "one row of strides": lambda x: x.flatten()[::3][:1].view(1, 1),
    "a number": lambda x: x[1, 1],
    "expanded": lambda x: x[0].expand(3, -1),
    "expanded in all dims": lambda x: x[0, 0].expand(2, 3),
    "nothing": lambda x: x[:0],
    "nothing with strides": lambda x: x.t()[:, :0],
    "permuted": lambda x: x.view(2, 2, 3).permute(2, 0, 1),
    "channels last": lambda x: x.view(1, 2, 2, 3).contiguous(memory_format=torch.channels_last),
    "negated": lambda x: torch._neg_view(x) if x.dtype.is_floating_point else x,
    "conjugated": lambda x: x.conj(),
    "imaginary part": lambda x: torch.complex(x, x).imag if x.dtype is torch.float32 else x,
    "requires grad": lambda x: x.requires_grad_() if x.dtype.is_floating_point else x,
}
DTYPES = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.complex64, torch.complex128,
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
)  # fmt: skip


def _makes(how: str, x: torch.Tensor) -> None:
    """Each way that compares values, given ``x``."""
    placement = Placement("cpu", [0, 1])
    made: list[Any] = [consistent.distribute(x, placement, B, check=True)]
    made.append(consistent.from_local(x.detach(), placement, B, check=True))
    if x.ndim and x.shape[0]:
        made.append(consistent.distribute(x, placement, S(0), check=True))
    with consistent.check_mode():
        made.append(consistent.distribute(x, placement, B))
        made.append(torch.zeros_like(made[0]) + x)
    for found in made:
        assert torch.equal(found.full(), x), how


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_equal_values_pass_however_they_lie(rank: int, how: str) -> None:
    for dtype in DTYPES:
        _makes(f"{how} {dtype}", WAYS[how](torch.arange(12.0).view(4, 3).to(dtype)))


@pytest.mark.parametrize("how", WAYS)
@on_ranks(2)
def test_other_values_are_found_however_they_lie(rank: int, how: str) -> None:
    for dtype in DTYPES:
        x = WAYS[how]((torch.arange(12.0) % 5 + rank).view(4, 3).to(dtype))
        if x.numel() == 0 or dtype is torch.bool:
            continue
        for make in (consistent.distribute, consistent.from_local):
            with pytest.raises(ValueError, match=r"ranks \d and \d must have the same values"):
                make(x.detach(), Placement("cpu", [0, 1]), B, check=True)
