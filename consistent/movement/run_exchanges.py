"""Exchanges of all tensors of a model between two layouts, in messages of bounded size.

A bucket is a group of tensors whose parts go in one batch of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from mirrored.transports.failures import counts_out_of_memory

from ..boxing.exchange import exchange
from .run import run
from .run_exchange import Route, run_together

# Bytes that all ranks together send at once: enough that the number of messages does not matter,
# but few compared to a model that fills the memory.
BUCKET_BYTES = 64 << 20


@counts_out_of_memory
def run_exchanges(
    locals_: Sequence[Tensor], routes: Sequence[Route], into: Sequence[Tensor]
) -> None:
    """Redistribute many tensors: fill each tensor of ``into`` with this rank's new shard.

    It moves a whole model to other ranks. Every rank of the world may call it; those outside all
    placements send nothing. Each rank of a target receives only what it needs and does not hold.

    Args:
        locals_: this rank's shards under the source specs.
        routes: (src, dst) of each, none of them partial, all between devices of the same kinds.
        into: the shards to fill, on ``meta`` outside the target. Where ``into[i]`` is
            ``locals_[i]`` itself, nothing is written: this rank keeps its shard.
    """
    cut_positions = [i for i, ends in enumerate(routes) if any(spec.layout.is_cut for spec in ends)]
    # The shard of a rank is no single box there, so one transfer cannot describe it.
    for i in cut_positions:
        shard = run(locals_[i], *routes[i])  # also by ranks that keep their shards
        if into[i] is not locals_[i]:
            into[i].copy_(shard)
    for bucket in _buckets(routes, cut_positions):
        xs, outs = ([tensors[i] for i in bucket] for tensors in (locals_, into))
        run_together(xs, [routes[i] for i in bucket], outs)


def _buckets(routes: Sequence[Route], cut_positions: Sequence[int]) -> Iterator[list[int]]:
    """Yield the positions of routes that are sent together, in groups of ``BUCKET_BYTES``.

    Those in ``cut_positions`` are left out. The groups are the same on every rank. Routes with the
    largest elements come first, so that each part is aligned in its message.
    """
    bucket: list[int] = []
    size = 0
    remaining = set(range(len(routes))).difference(cut_positions)
    for i in sorted(remaining, key=lambda i: (-routes[i][0].dtype.itemsize, i)):
        total = exchange(*routes[i]).total
        if bucket and size + total > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(i)
        size += total
    if bucket:
        yield bucket
