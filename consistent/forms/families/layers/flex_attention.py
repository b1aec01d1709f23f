"""Form of ``flex_attention`` on shards, where ``score_mod`` and ``mask_mod`` get logical positions.

The block mask says which blocks of keys each block of rows attends to, and is the same on all
ranks. So each rank knows which keys its rows need and which of its keys other ranks need, and ranks
exchange only these. Both functions are called only for the rows and keys that a rank has.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from mirrored.transports.default import current

from ....movement.recut import indices_of_runs
from ....spec import Runs, item_count
from ....spec.cut import merge_runs
from ...registry import Shards, form
from .block_attention import repeat_heads
from .fetched_keys import KeyRanges, fetch_keys
from .ring import Group, to_shard_positions
from .ring_attention import empty_output, group_of, scale_of

Positions = tuple[Tensor, Tensor, Tensor, Tensor]


class PositionMods(Protocol):
    """Interface of the call's score_mod and mask_mod, as the form calls them.

    Both are applied to whole blocks, given the logical (batch, head, row, key) positions. ``Mods``
    in ``dispatch/running`` implements it.
    """

    tensors_with_grad: Sequence[Tensor]  # tensors that the functions read and that have a gradient
    block_size: tuple[int, int]

    def scores(self, scores: Tensor, at: Positions) -> Tensor: ...

    def mask(self, at: Positions) -> Tensor | None: ...

    def attended_blocks(self) -> Tensor | None: ...


@form("flex_attention")
def flex_attention(shard: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch the keys that this rank's rows attend to, and compute attention with them.

    Returns (result, log-sum-exp of each row, largest score of each row).
    """
    query, key, value = shard.tensors
    mods: Any = shard.get("mods")
    if shard.coordinate is None:
        inputs = [*shard.tensors, *mods.tensors_with_grad]
        return (
            empty_output(shard, inputs),
            empty_output(shard, inputs, 1),
            empty_output(shard, inputs, 2),
        )
    group = group_of(shard, -2)
    wanted = _keys_to_fetch(group, mods)
    key, value = (fetch_keys(x, wanted) for x in (key, value))
    return _RowAttention(shard, group, wanted, mods).attend(query, key, value)


def _keys_to_fetch(group: Group, mods: PositionMods) -> KeyRanges:
    """Return which keys each rank must fetch from each other rank, by blocks of the block mask."""
    # A recorded step cannot depend on the values of the block mask, so it fetches all keys.
    blocks = None if current().records else mods.attended_blocks()
    seen = [_seen_keys(rows, blocks, mods.block_size) for rows in group.rows]
    return KeyRanges(
        group,
        tuple(tuple(_seen_keys_of_shard(each, keys) for keys in group.keys) for each in seen),
    )


def _seen_keys_of_shard(seen: Runs | None, keys: Runs) -> Runs:
    """Return which keys of a shard that holds ``keys`` are in ``seen``, as ranges of the shard.

    ``seen`` are logical ranges; None means all keys.
    """
    return (
        ((0, item_count(keys)),) if seen is None and keys else to_shard_positions(seen or (), keys)
    )


def _seen_keys(rows: Runs, blocks: Tensor | None, size: tuple[int, int]) -> Runs | None:
    """Return the keys that the rows in these ranges attend to, as (start, size) ranges.

    ``blocks`` is the matrix of which row block attends to which key block, with blocks of ``size``.
    Returns None if it is None: the rows may attend to all keys.
    """
    if blocks is None:
        return None
    seen_blocks = blocks.new_zeros(blocks.shape[-1], dtype=torch.bool)
    for start, count in rows:
        seen_blocks |= blocks[start // size[0] : -(-(start + count) // size[0])].any(0)
    return merge_runs((k * size[1], size[1]) for k in seen_blocks.nonzero().flatten().tolist())


class _RowAttention:
    """Attention of this rank's rows to the keys that were fetched for them."""

    def __init__(self, shard: Shards, group: Group, wanted: KeyRanges, mods: PositionMods) -> None:
        self.mods, self.group = mods, group
        self.blocks = None if current().records else mods.attended_blocks()
        coordinate = shard.coordinate
        assert coordinate is not None
        runs = shard.specs[0].runs(coordinate)
        device = shard.tensors[0].device
        self.batch, self.head = (indices_of_runs(r).to(device) for r in runs[:2])
        self.rows = runs[2]
        self.scale = scale_of(shard, shard.tensors[0])
        own_runs = wanted.runs[group.me]
        logical = [
            indices_of_runs(keys)[indices_of_runs(fetched_runs)]
            for fetched_runs, keys in zip(own_runs, group.keys, strict=True)
        ]
        self.keys = torch.cat(logical).to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention range by range of rows, each with the keys that it attends to.

        Returns (result, log-sum-exp, largest score).
        """
        place, results = 0, []
        for start, size in self.rows or ((0, 0),):
            rows = torch.arange(start, start + size, device=query.device)
            indices = self._seen_indices(start, size)
            selected = [x if indices is None else x[..., indices, :] for x in (key, value)]
            keys = self.keys if indices is None else self.keys[indices]
            positions = self.batch, self.head, rows, keys
            results.append(
                self._attend_range(
                    query[..., place : place + size, :], selected[0], selected[1], positions
                )
            )
            place += size
        out, log, top = zip(*results, strict=True)
        return torch.cat(out, -2), torch.cat(log, -1), torch.cat(top, -1)

    def _seen_indices(self, start: int, size: int) -> Tensor | None:
        """Return the indices of the fetched keys that ``size`` rows from ``start`` on attend to.

        Returns None if they attend to all of them.
        """
        if len(self.rows) == 1 or self.blocks is None:
            return None
        seen = _seen_keys(((start, size),), self.blocks, self.mods.block_size)
        inside = [(self.keys >= a) & (self.keys < a + n) for a, n in seen or ()]
        if not inside:
            return self.keys[:0]
        return torch.stack(inside).any(0).nonzero().flatten()

    def _attend_range(
        self, query: Tensor, key: Tensor, value: Tensor, positions: Positions
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        key, value = (repeat_heads(x, query) for x in (key, value))
        if not query[..., 0].numel() or not key.shape[-2]:
            return self._empty_result(query, key, value, wide)
        scores = self.mods.scores(query.to(wide) @ key.to(wide).mT * self.scale, positions)
        mask = self.mods.mask(positions)
        if mask is not None:
            scores = scores.masked_fill(~mask, -math.inf)
        probabilities = torch.ops.aten._safe_softmax(scores, -1)
        return probabilities.to(query.dtype) @ value, _logsumexp(scores), scores.amax(-1)

    def _empty_result(
        self, query: Tensor, key: Tensor, value: Tensor, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return zeros and log-sum-exps of -inf, for no rows or for rows without keys.

        The result has an autograd graph in which every input gets a gradient of zeros, as on other
        ranks.
        """
        inputs = (query, key, value, *self.mods.tensors_with_grad)
        # A zero whose autograd graph reaches every input.
        zero = torch.stack([x.reshape(-1)[:0].sum().to(wide) for x in inputs]).sum()
        statistics = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1])) + zero
        return out.to(query.dtype), statistics, statistics


def _logsumexp(scores: Tensor) -> Tensor:
    """Return the log-sum-exp of each row.

    Where all scores of a row are -inf, the gradient is zero, where that of torch's logsumexp is
    NaN.
    """
    # The gradient of logsumexp is NaN for a row of -inf, so mask such rows before and after.
    is_masked = (scores == -math.inf).all(-1)
    return (
        scores.masked_fill(is_masked.unsqueeze(-1), 0.0)
        .logsumexp(-1)
        .masked_fill(is_masked, -math.inf)
    )
