"""all_gather_matmul, matmul_reduce_scatter and matmul_all_reduce, values and gradients, against
float64 on one process.

On CUDA large ones are torch's fused ops where ranks read each other's memory, unless
CONSISTENT_SHARED_MEMORY=0 says not to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

import consistent
from consistent.overlap.symmetric_matmul import fused_group_and_dim
from consistent.spec import B, NdSbp, P, Placement, S, TensorSpec
from tests.gpu.world import World, start

ACTIVATIONS = {"none": lambda x: x, "gelu": F.gelu, "silu": F.silu}
SPLIT = {
    "all_gather_matmul": (S(0), S(1)),
    "matmul_reduce_scatter": (S(-1), S(0)),
    "matmul_all_reduce": (S(-1), S(0)),
}
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 3e-2}
EVEN, UNEVEN, LARGE = (64, 32, 48), (33, 17, 27), (512, 256, 384)  # rows, summed, columns
FUSED = (4096, 2048, 2048)  # enough to send that an overlap is worth it


class Case(NamedTuple):
    """One product."""

    name: str
    placement: Placement
    sbps: tuple[NdSbp, NdSbp, NdSbp]  # of x, w and bias
    size: tuple[int, int, int]
    dtype: torch.dtype
    activation: str


def line(world: World) -> Iterator[Case]:
    """All ranks on one axis."""
    placement = Placement(world.device, range(world.size))
    for name, (x, w) in SPLIT.items():
        sbps = (x,), (w,), (B,)
        for size in (EVEN, UNEVEN, LARGE):
            for dtype in TOLERANCES:
                for activation in ACTIVATIONS:
                    yield Case(name, placement, sbps, size, dtype, activation)
        if world.device == "cuda":
            for dtype in (torch.float32, torch.bfloat16):
                yield Case(name, placement, sbps, FUSED, dtype, "gelu")


def grid(world: World) -> Iterator[Case]:
    """Another axis splits the rows, or the columns."""
    placement = Placement(world.device, torch.arange(world.size).view(2, -1).tolist())
    for name, x, w in [
        ("matmul_all_reduce", (S(0), S(1)), (B, S(0))),
        ("matmul_reduce_scatter", (S(0), S(1)), (B, S(0))),
        ("all_gather_matmul", (S(0), S(0)), (B, S(1))),
        ("all_gather_matmul", (S(0), S(0)), (S(1), B)),
    ]:
        for size in (EVEN, UNEVEN):
            yield Case(name, placement, (x, w, (B, B)), size, torch.float64, "gelu")


def numbers(case: Case) -> list[Tensor]:
    """x, w, bias and the gradient of the result, of the case's dtype; alike on all ranks."""
    rows, summed, columns = case.size
    random = torch.Generator().manual_seed(7)
    shapes = (rows, summed), (summed, columns), (columns,), (rows, columns)
    made = [torch.randn(shape, generator=random, dtype=torch.float64) for shape in shapes]
    made[1] /= summed**0.5
    return [x.to(case.dtype) for x in made]


def wanted(case: Case) -> list[Tensor]:
    """Value and gradients in float64 of what the dtype holds, by torch alone."""
    *leaves, at_y = (x.to(case.placement.type, torch.float64) for x in numbers(case))
    leaves = [x.requires_grad_() for x in leaves]
    y = ACTIVATIONS[case.activation](leaves[0] @ leaves[1] + leaves[2])
    return [y, *torch.autograd.grad(y, leaves, at_y)]


def made(case: Case) -> list[Tensor]:
    """The same by us, whole on every rank."""
    *plain, at_y = numbers(case)
    given = [
        consistent.distribute(x, case.placement, sbp).requires_grad_()
        for x, sbp in zip(plain, case.sbps, strict=True)
    ]
    y = getattr(consistent, case.name)(*given, activation=case.activation)
    at_y = consistent.distribute(at_y, case.placement, (B,) * case.placement.ndim)
    (y * at_y).sum().backward()
    return [x.full() for x in (y.detach(), *(x.grad for x in given))]


def compare(world: World, cases: Iterator[Case], how: str) -> None:
    for case in cases:
        found = made(case)
        for what, ours, theirs in zip("y x w bias".split(), found, wanted(case), strict=True):
            name = f"{how}: {case.name} {case.size} {case.dtype} {case.activation}, {what}"
            world.close(ours, theirs, TOLERANCES[case.dtype], name)
    world.say(f"{how}: {world.tried} comparisons so far")


def is_fused(world: World) -> bool:
    """Whether the ranks take torch's fused op for a large product."""
    placement, shape = Placement(world.device, range(world.size)), (FUSED[0], FUSED[2])
    src, dst = (TensorSpec.of(placement, (e,), shape, torch.bfloat16) for e in (P, S(0)))
    return fused_group_and_dim(src, dst) is not None


def main() -> None:
    world = start(__doc__)
    shared = os.environ.get("CONSISTENT_SHARED_MEMORY", "1") != "0"
    fusing = world.device == "cuda" and world.size > 1 and shared
    world.expect(is_fused(world) == fusing, f"large products fuse: {not fusing}, not {fusing}")
    compare(world, line(world), "on one axis")
    if world.size % 2 == 0:
        compare(world, grid(world), "on a grid")
    world.end()


if __name__ == "__main__":
    main()
