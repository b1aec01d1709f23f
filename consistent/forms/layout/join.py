"""Forms of cat and split along a split dim.

Ranks exchange the elements that move to another rank.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...rules.halo.halo import Ranges
from ...rules.layout.join import JOIN_FORM, SPLIT_FORM, SPLIT_PARTS_FORM, operand_offsets
from ...spec import Coordinate, Split
from ..halo.halo import fetch_ranges
from ..registry import Shards, form


@form(JOIN_FORM)
def joined(shard: Shards) -> Tensor:
    """Run cat along a split dim: fetch from each operand its part of this rank's result."""
    out = shard.outs[0]
    dim = shard.call.dim("dim", 0, ndim=out.ndim)
    pieces = []
    for x, spec, start in zip(
        shard.tensors, shard.specs, operand_offsets(shard.call, dim), strict=True
    ):
        if start is None:  # torch's cat skips this operand
            continue

        def wanted(c: Coordinate, start: int = start) -> Ranges:
            firsts, counts = out.region(c)
            return [(firsts[dim] - start, firsts[dim] + counts[dim] - start)]

        pieces.append(fetch_ranges(shard, x, spec, dim, wanted))
    return torch.cat(pieces, dim)


@form(SPLIT_PARTS_FORM)
def parts(shard: Shards) -> tuple[Tensor, ...]:
    """Run split and similar ops on a dim that is split part by part, as by ``S(d, of=...)``.

    Each rank has its piece of every part already, so nothing is sent.
    """
    dim = next(e.dim for e in (shard.specs[0].sbp[a] for a in shard.axes) if isinstance(e, Split))
    return shard.tensors[0].split([shard.out_shape(i)[dim] for i in range(len(shard.outs))], dim)


@form(SPLIT_FORM)
def cut(shard: Shards) -> tuple[Tensor, ...]:
    """Run split and similar ops: fetch this rank's piece of every output, in one exchange."""
    (spec,), outs = shard.specs, shard.outs
    dim = next(e.dim for e in (spec.sbp[a] for a in shard.axes) if e.is_split)  # type: ignore
    starts = [0]
    for out in outs:
        starts.append(starts[-1] + out.shape[dim])

    def wanted(c: Coordinate) -> Ranges:
        boxes = [out.region(c) for out in outs]
        return [
            (start + firsts[dim], start + firsts[dim] + counts[dim])
            for start, (firsts, counts) in zip(starts, boxes, strict=False)
        ]

    x = fetch_ranges(shard, shard.tensors[0], spec, dim, wanted)
    return x.split([shard.out_shape(i)[dim] for i in range(len(outs))], dim)
