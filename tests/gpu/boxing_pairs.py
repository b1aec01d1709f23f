"""Boxing of every pair of SBPs, values and gradients, against the whole tensor on one process.

On one axis, and on grids of two; sizes that ranks share evenly and others; ranks in order and not.
Then between placements. Numbers are whole, so every sum is exact.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from consistent.movement.boxed import box
from consistent.spec import B, P, Placement, S, TensorSpec
from tests.gpu.world import World, start
from tests.reference import gather, in_grid_order, scatter, shard_at, whole_numbers

ENTRIES = (B, P, S(0), S(1))
# Cuts of dim 0; given sizes are added, which depend on the number of ranks.
CUTS = (B, P, S(0), S(0, cut="zigzag"), S(0, blocks=2), S(1, blocks=1))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)
EVEN, UNEVEN, EMPTY_PIECES, LARGE = (8, 4), (7, 5), (1, 3), (1031, 517)
# More than a rank gives at once of the memory that GPUs share.
BEYOND, BEYOND_PAIRS = (2053, 2049), ((P, B), (P, S(0)), (S(0), S(1)))
# (ranks of the source, of the target): apart, overlapping, one within the other, in another order.
MOVES = {
    2: [([0], [1]), ([0], [0, 1]), ([0, 1], [1]), ([0, 1], [1, 0])],
    4: [([0, 1], [2, 3]), ([0, 1, 2], [1, 3]), ([[0, 1], [2, 3]], [2, 1]), ([3], [0, 1, 2, 3])],
}


class Pair(NamedTuple):
    """A tensor's spec before and after."""

    src: TensorSpec
    dst: TensorSpec


class Held(NamedTuple):
    """What one rank has after a pair; None where it has nothing."""

    value: Tensor | None
    grad: Tensor | None


def pairs(ranks: Any, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> Iterator[Pair]:
    """All pairs of SBPs on one placement."""
    placement = Placement(device, ranks)
    sbps = list(itertools.product(ENTRIES, repeat=placement.ndim))
    specs = [TensorSpec.of(placement, sbp, shape, dtype) for sbp in sbps]
    yield from (Pair(a, b) for a, b in itertools.permutations(specs, 2))


def cuts(n: int, dtype: torch.dtype, device: str) -> Iterator[Pair]:
    """All pairs of cuts on one axis: dims that ranks do not share evenly, and given sizes of which
    one is empty."""
    placement = Placement(device, range(n))
    for rows in (4 * n + 3, 3):
        given = [*(range(n - 1)), rows - sum(range(n - 1))]
        entries = (*CUTS, S(0, sizes=given), S(0, sizes=given[::-1]))
        specs = [TensorSpec.of(placement, (sbp,), (rows, 5), dtype) for sbp in entries]
        yield from (Pair(a, b) for a, b in itertools.permutations(specs, 2))


def between(near: Any, far: Any, dtype: torch.dtype, device: str) -> Iterator[Pair]:
    """All pairs of SBPs between two placements."""
    ends = []
    for ranks in (near, far):
        placement = Placement(device, ranks)
        sbps = itertools.product(ENTRIES, repeat=placement.ndim)
        ends.append([TensorSpec.of(placement, sbp, UNEVEN, dtype) for sbp in sbps])
    yield from (Pair(a, b) for a, b in itertools.product(*ends))


def groups(n: int, device: str) -> Iterator[tuple[str, list[Pair]]]:
    """What is tried on ``n`` ranks, by name."""
    line, turned = list(range(n)), list(reversed(range(n)))
    for dtype in DTYPES:
        made = list(pairs(turned, UNEVEN, dtype, device))
        for shape in (EVEN, EMPTY_PIECES, LARGE):
            made += pairs(line, shape, dtype, device)
        yield f"one axis, {dtype}", made
    halves = torch.arange(n).view(2, -1) if n > 2 else torch.arange(n).view(n, 1)
    mixed = halves.flip(0).t()
    for dtype in DTYPES:
        made = list(pairs(halves.tolist(), EVEN, dtype, device))
        made += pairs(mixed.tolist(), UNEVEN, dtype, device)
        yield f"two axes, {dtype}", made
    for dtype in DTYPES:
        yield f"cuts, {dtype}", list(cuts(n, dtype, device))
    if device == "cuda":
        specs = partial(TensorSpec.of, Placement(device, line), shape=BEYOND, dtype=torch.float32)
        yield "large", [Pair(specs(sbp=(a,)), specs(sbp=(b,))) for a, b in BEYOND_PAIRS]
    for near, far in MOVES.get(n, []):
        made = [pair for dtype in DTYPES for pair in between(near, far, dtype, device)]
        yield f"from {near} to {far}", made


def scattered(pair: Pair, world: World) -> tuple[Tensor, Tensor]:
    """This rank's shards of the value before and of the gradient after, on its device."""
    shards = []
    for spec, seed in ((pair.src, 0), (pair.dst.dual, 1)):
        whole = whole_numbers(spec.shape, spec.dtype, seed)
        shard = shard_at(scatter(whole, spec), spec, world.rank)
        shards.append(shard if shard.is_meta else shard.to(world.device))
    return shards[0], shards[1]


def held(pair: Pair, world: World) -> Held:
    """Boxed there, and a gradient boxed back."""
    x, at_y = scattered(pair, world)
    if not x.is_floating_point():
        return Held(_kept(box(x, *pair)), None)
    x.requires_grad_()
    y = box(x, *pair)
    (at_x,) = torch.autograd.grad(y, x, at_y)
    return Held(_kept(y), _kept(at_x))


def _kept(x: Tensor) -> Tensor | None:
    return None if x.is_meta else x.detach().cpu()


def judge(world: World, pair: Pair, by_rank: list[Held]) -> None:
    """Against the whole; rank 0 only."""
    src, dst = pair
    ends = [(dst, [each.value for each in by_rank], 0, "value")]
    if src.dtype.is_floating_point:
        ends.append((src.dual, [each.grad for each in by_rank], 1, "gradient"))
    for spec, shards, seed, what in ends:
        name = f"{what} of {src} -> {dst}"
        own = in_grid_order(shards, spec)  # type: ignore[arg-type]
        wanted = scatter(whole_numbers(spec.shape, spec.dtype, seed), spec)
        if any(a.shape != e.shape or a.dtype != e.dtype for a, e in zip(own, wanted, strict=True)):
            world.expect(False, f"{name}: a shard has another shape or dtype")
            continue
        alike = all(
            torch.equal(a, e)
            for a, e in zip(own, wanted, strict=True)
            if not any(entry.is_partial for entry in spec.sbp)
        )
        whole = _joined(own, spec)
        world.expect(
            alike and torch.equal(whole, whole_numbers(spec.shape, spec.dtype, seed)), name
        )


def _joined(shards: list[Tensor], spec: TensorSpec) -> Tensor:
    """The whole; of B shards that differ, not a number."""
    try:
        return gather(shards, spec)
    except AssertionError:
        return torch.full(spec.shape, float("nan"))


def main() -> None:
    world = start(__doc__)
    for name, cases in groups(world.size, world.device):
        began = time.perf_counter()
        by_rank = world.gathered([held(pair, world) for pair in cases])
        for pair, results in zip(cases, zip(*by_rank, strict=True), strict=False):
            judge(world, pair, list(results))
        world.say(f"{name}: {len(cases)} pairs, {time.perf_counter() - began:.1f} s")
    world.end()


if __name__ == "__main__":
    main()
