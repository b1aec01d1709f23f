"""The keys that each row of attention attends to ("sees"), computed from positions without a mask.

They determine the blocks of scores that a rank computes and the keys that it is sent.

```
causal            window of 2       documents         a rank's rows and keys become blocks:
x . . . . .       x . . . . .       x . . . . .       rectangles, triangles, and bands, which
x x . . . .       x x . . . .       x x . . . .       are computed with a small mask each
x x x . . .       x x x . . .       . . x . . .
x x x x . .       . x x x . .       . . x x . .
x x x x x .       . . x x x .       . . x x x .
x x x x x x       . . . x x x       . . . . . x
```
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from ....spec import Runs
from ....spec.cut import merge_runs

# Minimum and maximum number of rows of a band that are computed at once.
_MIN_BAND_ROWS, _MAX_BAND_ROWS = 64, 512


@dataclass(frozen=True)
class Document:
    """A range of rows that attend only to a range of keys, both (start, stop).

    Of these keys, row i attends to those from i + ``low`` to i + ``high``; None is no limit.
    ``high=0`` is a causal mask.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    low: int | None = None
    high: int | None = None


Sight = tuple[Document, ...]


@dataclass(frozen=True)
class Block:
    """Block of scores between rows of one rank and keys of another, to be computed at once.

    ``rows`` and ``keys`` are (start, stop) in their shards, and ``position`` is the logical
    position of the first row and of the first key. In a ``triangle`` the first row attends to the
    first key, and each row to one key more than the row before. In a ``band`` (low, high)
    row i attends to the keys from i + low to i + high, in logical positions. Without either, all
    rows attend to all keys.
    """

    rows: tuple[int, int]
    keys: tuple[int, int]
    position: tuple[int, int]
    triangle: bool = False
    band: tuple[int, int] | None = None

    @property
    def row_slice(self) -> slice:
        """Slice of the block's rows in their shard."""
        return slice(*self.rows)

    @property
    def key_slice(self) -> slice:
        """Slice of the block's keys in their shard."""
        return slice(*self.keys)


def single_document(rows: int, keys: int, causal: bool) -> Sight:
    """Return the ``Sight`` for attention that is not divided into documents.

    Every row attends to all keys or, if ``causal``, to the keys up to its own position.
    """
    return (Document((0, rows), (0, keys), None, 0 if causal else None),)


@lru_cache(maxsize=1 << 12)
def blocks(sight: Sight, rows: Runs, keys: Runs, joins: bool = True) -> tuple[Block, ...]:
    """Return the blocks of scores between the rows of one shard and the keys of another.

    The shards store the (start, size) ranges ``rows`` and ``keys`` of the logical tensors. With
    ``joins``, rectangles that are adjacent in the shards become one, even if their keys are not
    adjacent in the logical tensor.
    """
    result: list[Block] = []
    for row, (a, m) in _runs_with_offsets(rows):
        for document in sight:
            document_rows = max(a, document.rows[0]), min(a + m, document.rows[1])
            if document_rows[0] >= document_rows[1]:
                continue
            for key, (c, n) in _runs_with_offsets(keys):
                document_keys = max(c, document.keys[0]), min(c + n, document.keys[1])
                for block in _blocks_of_document(
                    document_rows, document_keys, document.low, document.high
                ):
                    _append_or_merge(result, _to_shard_positions(block, row - a, key - c), joins)
    return tuple(result)


def _runs_with_offsets(runs: Runs) -> Iterator[tuple[int, tuple[int, int]]]:
    """Yield (start in the shard, range) of each logical range that a shard stores.

    ``((0, 2), (6, 2))`` gives (0, (0, 2)) and (2, (6, 2)).
    """
    first = 0
    for run in runs:
        yield first, run
        first += run[1]


def _to_shard_positions(block: Block, row: int, key: int) -> Block:
    """Convert ``block`` from logical positions to positions in the shards.

    ``row`` and ``key`` are the differences between the two.
    """
    (a, b), (c, d) = block.rows, block.keys
    places = (a + row, b + row), (c + key, d + key)
    return Block(*places, (a, c), block.triangle, block.band)


def _append_or_merge(collected: list[Block], block: Block, joins: bool) -> None:
    """Append ``block`` to ``collected``; with ``joins``, merge adjacent rectangles instead.

    They are merged if they have the same rows and adjacent keys.
    """
    last = collected[-1] if collected and joins else None
    plain = not block.triangle and block.band is None
    if last is not None and plain and not last.triangle and last.band is None:
        if last.rows == block.rows and last.keys[1] == block.keys[0]:
            collected[-1] = Block(last.rows, (last.keys[0], block.keys[1]), last.position)
            return
    collected.append(block)


def _blocks_of_document(
    rows: tuple[int, int], keys: tuple[int, int], low: int | None, high: int | None
) -> Iterator[Block]:
    """Yield the blocks, in logical positions, of rows i that attend to keys i + low to i + high."""
    (a, b), (c, d) = rows, keys
    if high is not None:  # leave out rows that see no key, and keys that no row sees
        a, d = max(a, c - high), min(d, b + high)
    if low is not None:
        b, c = min(b, d - low), max(c, a + low)
    if a >= b or c >= d:
        return
    if low is not None and b - 1 + low > c:  # the last row does not see the first key
        yield from _blocks_of_band((a, b), (c, d), low, d - a if high is None else high)
        return
    edge = d if high is None else min(d, a + high)
    if c < edge:
        yield Block((a, b), (c, edge), (a, c))
    if edge < d:
        last = min(b, a + d - edge)  # rows from here on see all keys
        yield Block((a, last), (edge, d), (a, edge), triangle=True)
        if last < b:
            yield Block((last, b), (edge, d), (last, edge))


def _blocks_of_band(
    rows: tuple[int, int], keys: tuple[int, int], low: int, high: int
) -> Iterator[Block]:
    """Yield a band as blocks of 64 to 512 rows, each with only the keys near the diagonal."""
    (a, b), (c, d) = rows, keys
    step = max(_MIN_BAND_ROWS, min(_MAX_BAND_ROWS, high - low))
    for first in range(a, b, step):
        last = min(first + step, b)
        start, stop = max(c, first + low), min(d, last + high)
        if start < stop:
            yield Block((first, last), (start, stop), (first, start), band=(low, high))


def band_mask(block: Block, device: torch.device) -> Tensor | None:
    """Return the boolean mask [rows, keys] of a band, or None for a block without a band."""
    if block.band is None:
        return None
    low, high = block.band
    rows = torch.arange(*block.rows, device=device) - block.rows[0] + block.position[0]
    keys = torch.arange(*block.keys, device=device) - block.keys[0] + block.position[1]
    ahead = keys - rows.unsqueeze(-1)
    return (ahead >= low) & (ahead <= high)


@lru_cache(maxsize=1 << 12)
def needed_keys(sight: Sight, rows: Runs, keys: Runs) -> Runs:
    """Return the keys that any of the rows attends to, as (start, size) ranges of the keys' shard.

    Only these need to be sent. The arguments are as in ``blocks``.
    """
    ranges = sorted(block.keys for block in blocks(sight, rows, keys))
    merged: list[tuple[int, int]] = []
    for start, stop in ranges:
        if merged and start <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], stop)
        else:
            merged.append((start, stop))
    return merge_runs((a, b - a) for a, b in merged)


def to_buffer_positions(blocks_of_shard: tuple[Block, ...], held: Runs) -> tuple[Block, ...]:
    """Convert blocks to a buffer that has only the ranges ``held`` of the shard of keys.

    A rank receives keys in such a buffer, one range after the other. A block may become several.
    """
    result = []
    for block in blocks_of_shard:
        place = 0
        for start, size in held:
            a, b = max(start, block.keys[0]), min(start + size, block.keys[1])
            if a < b:
                position = block.position[0], block.position[1] + a - block.keys[0]
                keys = place + a - start, place + b - start
                result.append(Block(block.rows, keys, position, block.triangle, block.band))
            place += size
    return tuple(result)
