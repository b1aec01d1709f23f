"""Attention whose rows are cut over ranks, against torch's on one process: results and gradients,
causal and not, with windows, with heads that share keys; and which of torch's kernels it uses."""

from __future__ import annotations

import itertools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent.forms.families.layers import attention_kernels
from consistent.forms.families.layers.attention_kernels import Mask, kernel_for
from consistent.spec import Placement, S
from tests.gpu.world import World, start

TOLERANCES = {torch.float64: 1e-10, torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
MASKS = ("none", "causal", "window", "bias")
ROWS = 192  # for 2, 3 and 4 ranks, zigzag too
HEADS = ((3, 3), (6, 2))  # of queries, of keys: the first divides by no number of ranks here


class Case(NamedTuple):
    """One call."""

    layout: Any
    mask: str
    heads: tuple[int, int]
    size: int
    dtype: torch.dtype


def cases() -> list[Case]:
    """All of them."""
    layouts = S(2), S(2, cut="zigzag")
    return [Case(*each) for each in itertools.product(layouts, MASKS, HEADS, (64, 40), TOLERANCES)]


def numbers(case: Case) -> list[Tensor]:
    """Query, key, value, and the gradient of the result, in float64, but as the dtype holds them;
    alike on all ranks."""
    random = torch.Generator().manual_seed(7)
    shapes = [(2, heads, ROWS, case.size) for heads in (*case.heads, case.heads[1], case.heads[0])]
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    return [x.to(case.dtype).double() for x in made]


def mask_of(case: Case) -> Tensor | None:
    """The mask of all rows and keys."""
    if case.mask == "window":
        row, key = torch.arange(ROWS)[:, None], torch.arange(ROWS)
        return (key <= row) & (key > row - 20)
    if case.mask == "bias":
        drawn = torch.randn(ROWS, ROWS, generator=torch.Generator().manual_seed(8))
        return drawn.to(case.dtype).double()
    return None


def called(given: list[Any], mask: Any, case: Case, at_y: Any) -> list[Any]:
    """The result and the gradients of query, key and value."""
    leaves = [x.requires_grad_() for x in given]
    causal, shared = case.mask == "causal", case.heads[0] != case.heads[1]
    y = F.scaled_dot_product_attention(*leaves, mask, is_causal=causal, enable_gqa=shared)
    return [y, *torch.autograd.grad(y, leaves, at_y)]


def compare(world: World, case: Case) -> None:
    """All that the call gives, with plain torch in float64."""
    placement = Placement(world.device, range(world.size))
    *given, at_y = numbers(case)
    mask, what = mask_of(case), " ".join(map(str, case))
    wanted = called([x.clone() for x in given], mask, case, at_y)
    laid = [consistent.distribute(x.to(case.dtype), placement, case.layout) for x in (*given, at_y)]
    if mask is not None:
        mask = mask.to(world.device, mask.dtype if mask.dtype is torch.bool else case.dtype)
    made = called(laid[:3], mask, case, laid[3])
    for name, x, y in zip(("y", "query", "key", "value"), made, wanted, strict=True):
        world.close(x.full(), y, TOLERANCES[case.dtype], f"{what}, {name}")


def kernels(world: World) -> None:
    """A GPU computes blocks without a bias by torch's kernels, if it has some for the dtype."""
    for dtype, triangle in itertools.product(TOLERANCES, (False, True)):
        x = torch.zeros(1, 2, 64, 64, dtype=dtype, device=world.device)
        found = kernel_for(x, x, x, Mask(1.0, triangle, None))
        half = dtype.itemsize == 2 and torch.cuda.get_device_capability() >= (8, 0)
        wanted = attention_kernels._FLASH if half else attention_kernels._EFFICIENT
        named = None if dtype is torch.float64 else wanted
        world.expect(found is named, f"{dtype}, triangle {triangle}: {found}")


def main() -> None:
    world = start(__doc__)
    if world.device == "cuda":
        kernels(world)
    for case in cases()[world.part]:
        compare(world, case)
    world.end()


if __name__ == "__main__":
    main()
