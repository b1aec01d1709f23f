"""Cuts a whole tensor into shards and joins them again, for one SBP on each axis. P is split at
random and unevenly, so that no wrong rule passes by luck."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from consistent.spec import B, NdSbp, Partial, Sbp, Split, piece
from mirrored.reduction import identity, ordered_reduce
from tests.rounding import few_digits

Tensors = list[torch.Tensor]


def scatter(
    x: torch.Tensor, sbp: NdSbp, shape: tuple[int, ...], random: torch.Generator
) -> Tensors:
    """Shards of the whole tensor `x`, in grid order of a placement of `shape`, outer axis first."""
    if not shape:
        return [x.clone()]
    entry, parts = sbp[0], shape[0]
    return [
        s for y in _cut(x, entry, parts, random) for s in scatter(y, sbp[1:], shape[1:], random)
    ]


def _cut(x: torch.Tensor, entry: Sbp, parts: int, random: torch.Generator) -> Tensors:
    if isinstance(entry, Split):
        return [x.narrow(entry.dim, *piece(x.shape[entry.dim], parts, i)) for i in range(parts)]
    if isinstance(entry, Partial) and entry.is_extreme:
        return _bounds(x, entry.op, parts, random)
    if entry is B:
        return [x] * parts
    addends = [_noise(x, random) for _ in range(parts - 1)]
    return [x - sum(addends), *addends]


def _bounds(x: torch.Tensor, op: str, parts: int, random: torch.Generator) -> Tensors:
    """P(max), P(min): one rank has the element, the others one that does not beat it, or the
    identity."""
    winner = torch.randint(0, parts, x.shape, generator=random)
    worse = torch.minimum if op == "max" else torch.maximum
    worst = torch.full_like(x, identity(x.dtype, op))
    pieces = []
    for rank in range(parts):
        is_worst = torch.rand(x.shape, generator=random) < 0.3
        loser = torch.where(is_worst, worst, worse(x, _noise(x, random)))
        pieces.append(torch.where(winner == rank, x, loser))
    return pieces


def _noise(x: torch.Tensor, random: torch.Generator) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        noise = 3 * torch.randn(x.shape, dtype=x.dtype, generator=random)
        return few_digits(noise) if x.dtype == torch.float32 else noise
    return torch.randint(-9, 9, x.shape, generator=random).to(x.dtype)


def gather(
    shards: Sequence[torch.Tensor], sbp: NdSbp, shape: tuple[int, ...], tolerance: float = 1e-7
) -> torch.Tensor:
    """The whole tensor again. B shards must agree up to ``tolerance``."""
    if not shape:
        return shards[0]
    step = len(shards) // shape[0]
    pieces = [
        gather(shards[i : i + step], sbp[1:], shape[1:], tolerance)
        for i in range(0, len(shards), step)
    ]
    entry = sbp[0]
    if isinstance(entry, Split):
        return torch.cat(pieces, entry.dim)
    if isinstance(entry, Partial):
        return ordered_reduce(pieces, entry.op) if entry.is_extreme else sum(pieces[1:], pieces[0])
    for other in pieces[1:]:
        torch.testing.assert_close(
            other,
            pieces[0],
            equal_nan=True,
            rtol=tolerance,
            atol=tolerance,
            msg="ranks differ where all hold the same",
        )
    return pieces[0]
