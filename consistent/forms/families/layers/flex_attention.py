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

from ....movement.recut import places
from ....spec import Runs, items_in
from ....spec.cut import joined
from ...registry import Shards, form
from .block_attention import heads_for
from .fetched_keys import Wanted, fetched
from .ring import Group, within
from .ring_attention import group_of, nothing, scale_of

Places = tuple[Tensor, Tensor, Tensor, Tensor]


class PositionMods(Protocol):
    """Interface of the call's score_mod and mask_mod, as the form calls them.

    Both are applied to whole blocks, given the logical (batch, head, row, key) positions. ``Mods``
    in ``dispatch/running`` implements it.
    """

    learned: Sequence[Tensor]  # tensors that the functions read and that have a gradient
    block_size: tuple[int, int]

    def scores(self, scores: Tensor, at: Places) -> Tensor: ...

    def sees(self, at: Places) -> Tensor | None: ...

    def seen_blocks(self) -> Tensor | None: ...


@form("flex_attention")
def flex_attention(shard: Shards) -> tuple[Tensor, Tensor, Tensor]:
    """Fetch the keys that this rank's rows attend to, and compute attention with them.

    Returns (result, log-sum-exp of each row, largest score of each row).
    """
    query, key, value = shard.tensors
    mods: Any = shard.get("mods")
    if shard.coordinate is None:
        given = [*shard.tensors, *mods.learned]
        return nothing(shard, given), nothing(shard, given, 1), nothing(shard, given, 2)
    group = group_of(shard, -2)
    wanted = _wanted(group, mods)
    key, value = (fetched(x, wanted) for x in (key, value))
    return _Rows(shard, group, wanted, mods).attend(query, key, value)


def _wanted(group: Group, mods: PositionMods) -> Wanted:
    """Return which keys each rank must fetch from each other rank, by blocks of the block mask."""
    # A recorded step cannot depend on the values of the block mask, so it fetches all keys.
    blocks = None if current().records else mods.seen_blocks()
    seen = [_seen(rows, blocks, mods.block_size) for rows in group.rows]
    return Wanted(
        group,
        tuple(tuple(_held(each, keys) for keys in group.keys) for each in seen),
    )


def _held(seen: Runs | None, keys: Runs) -> Runs:
    """Return which keys of a shard that holds ``keys`` are in ``seen``, as ranges of the shard.

    ``seen`` are logical ranges; None means all keys.
    """
    return ((0, items_in(keys)),) if seen is None and keys else within(seen or (), keys)


def _seen(rows: Runs, blocks: Tensor | None, size: tuple[int, int]) -> Runs | None:
    """Return the keys that the rows in these ranges attend to, as (start, size) ranges.

    ``blocks`` is the matrix of which row block attends to which key block, with blocks of ``size``.
    Returns None if it is None: the rows may attend to all keys.
    """
    if blocks is None:
        return None
    found = blocks.new_zeros(blocks.shape[-1], dtype=torch.bool)
    for start, count in rows:
        found |= blocks[start // size[0] : -(-(start + count) // size[0])].any(0)
    return joined((k * size[1], size[1]) for k in found.nonzero().flatten().tolist())


class _Rows:
    """Attention of this rank's rows to the keys that were fetched for them."""

    def __init__(self, shard: Shards, group: Group, wanted: Wanted, mods: PositionMods) -> None:
        self.mods, self.group = mods, group
        self.blocks = None if current().records else mods.seen_blocks()
        at = shard.coordinate
        assert at is not None
        runs = shard.specs[0].runs(at)
        device = shard.tensors[0].device
        self.batch, self.head = (places(r).to(device) for r in runs[:2])
        self.rows = runs[2]
        self.scale = scale_of(shard, shard.tensors[0])
        mine = wanted.runs[group.me]
        logical = [places(keys)[places(held)] for held, keys in zip(mine, group.keys, strict=True)]
        self.keys = torch.cat(logical).to(device)

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute attention range by range of rows, each with the keys that it attends to.

        Returns (result, log-sum-exp, largest score).
        """
        place, found = 0, []
        for start, size in self.rows or ((0, 0),):
            rows = torch.arange(start, start + size, device=query.device)
            chosen = self._chosen(start, size)
            some = [x if chosen is None else x[..., chosen, :] for x in (key, value)]
            keys = self.keys if chosen is None else self.keys[chosen]
            at = self.batch, self.head, rows, keys
            found.append(self._run(query[..., place : place + size, :], some[0], some[1], at))
            place += size
        out, log, top = zip(*found, strict=True)
        return torch.cat(out, -2), torch.cat(log, -1), torch.cat(top, -1)

    def _chosen(self, start: int, size: int) -> Tensor | None:
        """Return the indices of the fetched keys that ``size`` rows from ``start`` on attend to.

        Returns None if they attend to all of them.
        """
        if len(self.rows) == 1 or self.blocks is None:
            return None
        seen = _seen(((start, size),), self.blocks, self.mods.block_size)
        inside = [(self.keys >= a) & (self.keys < a + n) for a, n in seen or ()]
        if not inside:
            return self.keys[:0]
        return torch.stack(inside).any(0).nonzero().flatten()

    def _run(
        self, query: Tensor, key: Tensor, value: Tensor, at: Places
    ) -> tuple[Tensor, Tensor, Tensor]:
        wide = torch.float64 if query.dtype is torch.float64 else torch.float32
        key, value = (heads_for(x, query) for x in (key, value))
        if not query[..., 0].numel() or not key.shape[-2]:
            return self._empty(query, key, value, wide)
        scores = self.mods.scores(query.to(wide) @ key.to(wide).mT * self.scale, at)
        sees = self.mods.sees(at)
        if sees is not None:
            scores = scores.masked_fill(~sees, -math.inf)
        chances = torch.ops.aten._safe_softmax(scores, -1)
        return chances.to(query.dtype) @ value, _log(scores), scores.amax(-1)

    def _empty(
        self, query: Tensor, key: Tensor, value: Tensor, wide: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return zeros and log-sum-exps of -inf, for no rows or for rows without keys.

        The result has an autograd graph in which every input gets a gradient of zeros, as on other
        ranks.
        """
        given = (query, key, value, *self.mods.learned)
        # A zero whose autograd graph reaches every input.
        none = torch.stack([x.reshape(-1)[:0].sum().to(wide) for x in given]).sum()
        rows = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1])) + none
        return out.to(query.dtype), rows, rows


def _log(scores: Tensor) -> Tensor:
    """Return the log-sum-exp of each row.

    Where all scores of a row are -inf, the gradient is zero, where that of torch's logsumexp is
    NaN.
    """
    # The gradient of logsumexp is NaN for a row of -inf, so mask such rows before and after.
    dead = (scores == -math.inf).all(-1)
    return scores.masked_fill(dead.unsqueeze(-1), 0.0).logsumexp(-1).masked_fill(dead, -math.inf)
