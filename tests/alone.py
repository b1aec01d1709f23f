"""One rank of a world by itself: if it sends anything, it raises at once. In a real world it would
wait for the others.

```
for rank in range(3):
    with alone(rank, 3):
        x = laid(full, placement, (S(0),))     # this rank's shard of it
        str(x)                                 # raises if it communicates
```
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor

from consistent.dispatch.plans.plan import clear_plans
from consistent.dispatch.plans.shards import attach
from consistent.spec import Placement, Sbp, TensorSpec
from mirrored import comm
from mirrored.transports.default import current, use
from tests.ranks import ALL
from tests.reference import scatter, shard_at


class Communicated(BaseException):
    """A rank that was alone sent something. It is a BaseException, so no `except Exception` hides
    it."""


class Alone(comm.Transport):
    """A transport that claims to be one rank of several, and raises when it should send."""

    def __init__(self, rank: int, size: int) -> None:
        self._rank, self._size = rank, size

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise Communicated(f"rank {self._rank} of {self._size} communicates")

    all_reduce_async = all_gather = all_to_all = broadcast = exchange = gather_objects = _refuse
    shares = send = receive = _refuse


@contextmanager
def alone(rank: int, size: int) -> Iterator[None]:
    """Inside the `with` block this thread is `rank` of `size`, and the other ranks do not exist.
    Plans depend on a rank's place, so they are made again."""
    clear_plans()
    try:
        with use(Alone(rank, size)):
            yield
    finally:
        clear_plans()


def laid(full: Tensor, placement: Placement, sbp: Sequence[Sbp], seed: int = 0) -> Any:
    """The global tensor of value `full`, made of this rank's shard. Strides are in `full`'s
    order."""
    spec = TensorSpec.of(placement, tuple(sbp), full.shape, full.dtype)
    shard = shard_at(scatter(full, spec, seed), spec, current().rank)
    return attach(_in_order_of(full, shard), spec)


def _in_order_of(full: Tensor, shard: Tensor) -> Tensor:
    order = sorted(range(full.ndim), key=lambda d: (-full.stride(d), d))
    back = sorted(range(full.ndim), key=order.__getitem__)
    return shard.permute(order).contiguous().permute(back)


def grids(entries: Sequence[Sbp]) -> Iterator[tuple[int, int, Placement, tuple[Sbp, ...]]]:
    """(rank, size of the world, placement, sbp) for every rank of worlds of two, three and four,
    with one axis and two, inside the placement and outside. Of two axes each pair of entries has
    one rank in turn."""
    one = [(2, [0, 1]), (3, [2, 0, 1]), (3, [0, 2]), (2, [1])]
    for size, ranks in one:
        for entry, rank in itertools.product(entries, range(size)):
            yield rank, size, Placement("cpu", ranks), (entry,)
    pairs = [
        (a, b)
        for a, b in itertools.product(entries, repeat=2)
        if not (a.is_partial and b.is_partial and a is not b)
    ]
    for number, pair in enumerate(pairs):
        for rank in range(4) if ALL else ((number + number // 4) % 4,):
            yield rank, 4, Placement("cpu", [[0, 1], [2, 3]]), pair
