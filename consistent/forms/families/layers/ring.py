"""Ring attention: the keys and values of all ranks pass by in turn, and their gradients go back.

```
            step 0                  step 1                  step 2
rank 0      q0 x k0, v0             q0 x k1, v1             q0 x k2, v2        each result is joined
rank 1      q1 x k1, v1             q1 x k2, v2             q1 x k0, v0        with those before by
rank 2      q2 x k2, v2             q2 x k0, v0             q2 x k1, v1        its log-sum-exp
```

A row "sees" the keys that it attends to. A rank is sent only the keys that some of its rows see
(``sight.py``): under a causal mask no keys after all of its rows, for a sliding window the keys at
its border, for a document on a single rank nothing. Where the transport overlaps messages with
compute, the next keys travel during a step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from mirrored.transports.default import current

from ....spec import Runs, items_in, overlapping
from ....spec.cut import joined
from . import sight as seeing
from .block_attention import (
    BlockOptions,
    Drop,
    Grads,
    attend,
    attend_backward,
    heads_for,
    join,
    of_groups,
)
from .sight import Block, Sight

Arriving = Callable[[], list[Tensor]]
_LABEL = "keys of attention"
_GAP = 16  # unseen keys between two runs are sent as well if there are fewer than this
_LONG = 1 << 21  # bytes of a rank's keys above which the heads are processed in groups
_GROUPS = 4


@dataclass(frozen=True)
class Group:
    """The ranks that share the rows and keys of one attention, and which of these each holds.

    Args:
        ranks: the world ranks.
        me: index of this rank among them.
        rows: for each rank, the logical (start, size) ranges of its rows.
        keys: likewise of its keys.
    """

    ranks: tuple[int, ...]
    me: int  # this rank's place among them
    rows: tuple[Runs, ...]  # for each rank, as logical runs
    keys: tuple[Runs, ...]


@dataclass(frozen=True)
class Needs:
    """The keys that the rows of each rank attend to, and so the keys that ranks must send.

    ``sight`` describes them by position, as under a causal mask. If there is a mask tensor,
    ``by_mask`` has for each rank the ranges of logical keys that some of its rows attend to under
    the mask.
    """

    group: Group
    sight: Sight
    by_mask: tuple[Runs, ...] | None = None

    def held(self, rank: int, source: int) -> Runs:
        """Return which keys of the shard of ``source`` the rows of ``rank`` attend to.

        As (start, size) ranges of the shard. Both ranks are indices in the group.
        """
        group = self.group
        found = seeing.seen(self.sight, group.rows[rank], group.keys[source])
        if self.by_mask is None:
            return found
        return _in_both(found, within(self.by_mask[rank], group.keys[source]))

    def steps(self) -> list[int]:
        """Return the steps of the ring in which at least one rank is sent keys.

        All ranks skip the other steps.
        """
        count = len(self.group.ranks)
        return [step for step in range(1, count)
                if any(self.held(k, (k + step) % count) for k in range(count))]  # fmt: skip

    def blocks(self, source: int, joins: bool) -> tuple[Block, ...]:
        """Return the blocks of attention that this rank computes with the keys of ``source``.

        Positions of keys are those in the shard, or in the buffer received from another rank. With
        ``joins``, adjacent rectangles are merged.
        """
        group = self.group
        found = seeing.blocks(self.sight, group.rows[group.me], group.keys[source], joins)
        if source == group.me:
            return found
        return seeing.packed(found, self.held(group.me, source))


# -- by values -------------------------------------------------------------------------------------


def needs_of(group: Group, sight: Sight, mask: Tensor | None) -> Needs:
    """Return which keys the rows of each rank attend to.

    If ``mask`` is given, with this rank's rows and all keys, the ranks exchange which keys any of
    their rows attends to.
    """
    if mask is None:
        return Needs(group, sight)
    seen = mask if mask.dtype is torch.bool else mask != -math.inf
    seen = seen.reshape(-1, seen.shape[-1]).any(0)
    keys = sum(items_in(runs) for runs in group.keys)
    mine = seen.expand(keys).to(torch.uint8)
    every = current().all_gather(mine.contiguous(), [mine.shape] * len(group.ranks), group.ranks)
    return Needs(group, sight, tuple(_runs_of(each) for each in every))


def _runs_of(seen: Tensor) -> Runs:
    """Return the (start, size) ranges of nonzero elements of the vector ``seen``.

    Gaps of fewer than ``_GAP`` elements are included, so that few ranges are sent.
    """
    places = seen.nonzero().flatten().cpu()
    if not len(places):
        return ()
    breaks = (places.diff() > _GAP).nonzero().flatten()
    firsts = places[torch.cat([breaks.new_zeros(1), breaks + 1])].tolist()
    lasts = places[torch.cat([breaks, breaks.new_tensor([len(places) - 1])])].tolist()
    return tuple((a, b + 1 - a) for a, b in zip(firsts, lasts, strict=True))


def within(logical: Runs, held: Runs) -> Runs:
    """Return the part of the ranges ``logical`` that a shard has, as positions in the shard.

    ``held`` are the ranges of the logical tensor that the shard stores, one after the other:
    logical ((4, 2),) in a shard of ((0, 2), (4, 2)) is ((2, 2),).
    """
    found, place = [], 0
    for start, size in held:
        for a, n in overlapping(logical, ((start, size),)):
            found.append((place + a - start, n))
        place += size
    return joined(found)


def _in_both(a: Runs, b: Runs) -> Runs:
    return joined(overlapping(a, b))


# -- forward and backward --------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Forward and backward pass of the attention of this rank's rows to the keys of all ranks.

    Args:
        needs: which keys the rows of each rank attend to.
        scale: factor of the scores.
        drop: dropout of a block of probabilities, or None.
    """

    needs: Needs
    scale: float
    drop: Drop | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return (result for this rank's rows, log-sum-exp of each row).

        ``query``, ``key`` and ``value`` are this rank's shards. ``mask``, if any, has this rank's
        rows and all keys.
        """
        wide = _wide(query.dtype)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        total = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        for some in self._groups(query, key):
            given = some(query, key, value, out, total)
            self._forward_heads(*given, mask=some.of_mask(mask))
        return out.to(query.dtype), total

    def _forward_heads(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor,
        mask: Tensor | None,
    ) -> None:  # fmt: skip
        for step, pair in self._round(key, value):
            for block in self._seen(step, mask):
                how, rows = self._how(block, mask, query.device), block.row_slice
                part = attend(query[..., rows, :], *self._keys(block, pair, query), how)
                join(out[..., rows, :], total[..., rows], *part)
                del part  # so that results of two blocks are never in memory at once

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor,
        mask: Tensor | None, of_mask: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of query, key and value, and of the mask if ``of_mask``.

        ``grad`` is the gradient of ``out``; ``out`` and ``total`` are what ``forward`` has
        returned.
        """
        # Contiguous, because compiled programs expect contiguous results from a message.
        made = [x.new_zeros(x.shape, dtype=total.dtype) for x in (query, key, value)]
        learned = mask.new_zeros(mask.shape) if of_mask and mask is not None else None
        for some in self._groups(query, key):
            given = some(grad, query, key, value, out, total)
            self._backward_heads(given, some.of_mask(mask), some(*made), some.of_mask(learned))
        found = [x.to(y.dtype) for x, y in zip(made, (query, key, value), strict=True)]
        return found if learned is None else [*found, learned]

    def _backward_heads(
        self, given: Sequence[Tensor], mask: Tensor | None, made: Sequence[Tensor],
        learned: Tensor | None,
    ) -> None:  # fmt: skip
        grad, query, key, value, out, total = given
        of_query, *of_keys = made
        returning = _Returning(self.needs, of_keys, key)
        for step, pair in self._round(key, value):
            into = of_keys if step == 0 else []
            for block in self._seen(step, mask):
                how, rows = self._how(block, mask, query.device), block.row_slice
                grads = attend_backward(
                    grad[..., rows, :], query[..., rows, :], *self._keys(block, pair, query),
                    out[..., rows, :], total[..., rows], how, of_scores=learned is not None,
                )  # fmt: skip
                of_query[..., rows, :] += grads.query
                into = _added(grads, block, into, pair)
                if learned is not None and grads.scores is not None:
                    place = _of_mask(learned, block)
                    place += grads.scores.sum_to_size(place.shape)
                del grads
            if step:
                sees = pair[0].shape[-2] > 0
                found = [x.to(key.dtype) for x in into] or [torch.zeros_like(x) for x in pair]
                returning.give(step, found if sees else [])
        returning.take()

    def _groups(self, query: Tensor, key: Tensor) -> list[_Heads]:
        """Return the groups of heads to process one after the other; often one group of all heads.

        For long sequences a group has a few heads, whose keys are sent in one message, so that
        little memory is held in addition to the operands.
        """
        heads, group = key.shape[-3], self.needs.group
        keys = sum(items_in(runs) for runs in group.keys)
        nbytes = keys * key.shape[-1] * key.element_size() * heads * key.shape[:-3].numel()
        count = math.gcd(heads, _GROUPS) if nbytes > _LONG * len(group.ranks) else 1
        count = 1 if self.drop is not None else count
        return [_Heads(query.ndim - 3, i, count) for i in range(count)]

    def _keys(self, block: Block, pair: Sequence[Tensor], query: Tensor) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block, with one head for each head of ``query``.

        ``pair`` are all keys and values that this rank has received in the step.
        """
        key, value = (heads_for(x[..., block.key_slice, :], query) for x in pair)
        return key, value

    def _seen(self, step: int, mask: Tensor | None) -> Iterator[Block]:
        """Yield the blocks to compute with the keys that arrive in a step.

        Blocks in which the mask hides every key are left out.
        """
        joins = mask is None and self.drop is None
        source = (self.needs.group.me + step) % len(self.needs.group.ranks)
        for block in self.needs.blocks(source, joins):
            if self.needs.by_mask is not None and mask is not None:
                part = _of_mask(mask, block)
                if not (part if part.dtype is torch.bool else part != -math.inf).any():
                    continue
            yield block

    def _how(self, block: Block, mask: Tensor | None, device: torch.device) -> BlockOptions:
        """Return the options by which ``block`` is computed: its scale, bias and dropout."""
        bias = seeing.band_mask(block, device) if mask is None else _of_mask(mask, block)
        if bias is not None and bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, -math.inf)
        return BlockOptions(self.scale, block.triangle, bias, self.drop, block.at)

    def _round(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (step, [keys, values] that arrived in it), from step 0 with this rank's own keys.

        If a step brings none to this rank, the tensors are empty. Where the transport overlaps
        messages with compute, the next keys travel while the caller works on these.
        """
        steps = self.needs.steps()
        coming = self._start(steps[0], key, value) if steps else None
        yield 0, [key, value]
        for step, following in zip(steps, [*steps[1:], None]):
            assert coming is not None
            arrived, coming = coming(), None  # drops the reference to what was sent
            if following is not None:
                coming = self._start(following, key, value)
            yield step, arrived or [key[..., :0, :], value[..., :0, :]]

    def _start(self, step: int, key: Tensor, value: Tensor) -> Arriving:
        """Start to send and receive the keys of ring step ``step``; return a function to wait."""
        needs, count, me = self.needs, len(self.needs.group.ranks), self.needs.group.me
        to, source = (me - step) % count, (me + step) % count
        going, coming = needs.held(to, me), items_in(needs.held(me, source))
        sends = [(to, _taken(x, going)) for x in (key, value)] if going else []
        shapes = [(*x.shape[:-2], coming, x.shape[-1]) for x in (key, value)] if coming else []
        return _start(needs.group, sends, [(source, shape) for shape in shapes], key)


@dataclass(frozen=True)
class _Heads:
    """One of ``count`` groups of heads, as a function that selects these heads of tensors.

    ``index`` is the group's number. ``dim`` is the heads dim of all tensors except a mask.
    """

    dim: int
    index: int
    count: int

    def __call__(self, *given: Tensor) -> Any:
        """Return each tensor narrowed to the heads of this group."""
        return [self._narrowed(x, self.dim) for x in given]

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return ``mask`` narrowed to the heads of this group.

        A mask has rows and keys as its last dims. If it has one head for all, or no heads dim, it
        is returned as it is.
        """
        if mask is None or mask.ndim < 3 or mask.shape[-3] == 1:
            return mask
        return self._narrowed(mask, mask.ndim - 3)

    def _narrowed(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.count
        return x if self.count == 1 else x.narrow(dim, size * self.index, size)


def _added(
    grads: Grads, block: Block, into: Sequence[Tensor], pair: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Add the gradients of a block to the sums ``into`` of keys and values, and return the sums.

    ``into`` is empty before the first block. ``pair`` are the keys and values.
    """
    found = [of_groups(x, y.shape[-3]) for x, y in zip((grads.key, grads.value), pair, strict=True)]
    if not into:
        if block.keys == (0, pair[0].shape[-2]):
            return found
        into = [torch.zeros_like(x, dtype=_wide(x.dtype)) for x in pair]
    for x, place in zip(found, into, strict=True):
        place[..., block.key_slice, :] += x
    return into


def _wide(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of ``dtype`` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


class _Returning:
    """Sends gradients of keys and values back to the ranks that own the keys, and receives them.

    They travel in the dtype of ``key`` and are accumulated in ``into``, in the dtype of ``into``.
    """

    def __init__(self, needs: Needs, into: Sequence[Tensor], key: Tensor) -> None:
        self._needs, self._into, self._key = needs, into, key
        self._coming: tuple[Runs, Arriving] | None = None

    def give(self, step: int, grads: Sequence[Tensor]) -> None:
        """Start to send ``grads`` of the keys received in ``step`` to the owner of these keys."""
        group, count = self._needs.group, len(self._needs.group.ranks)
        to, source = (group.me + step) % count, (group.me - step) % count
        held = self._needs.held(source, group.me)
        shapes = [(*x.shape[:-2], items_in(held), x.shape[-1]) for x in self._into] if held else []
        started = _start(
            group, [(to, x) for x in grads], [(source, shape) for shape in shapes], self._key
        )
        self.take()  # after the start, so that two steps of gradients overlap
        self._coming = held, started

    def take(self) -> None:
        """Wait for the gradients that the last ``give`` awaits, and add them to ``into``."""
        if self._coming is not None:
            held, arriving = self._coming
            self._coming = None
            self._add(held, arriving())

    def _add(self, held: Runs, grads: Sequence[Tensor]) -> None:
        for into, x in zip(self._into, grads):
            place = 0
            for start, size in held:
                into[..., start : start + size, :] += x[..., place : place + size, :]
                place += size


def _start(
    group: Group,
    sends: Sequence[tuple[int, Tensor]],
    receives: Sequence[tuple[int, tuple[int, ...]]],
    like: Tensor,
) -> Arriving:
    """Start to send and receive tensors; ranks are indices in the group.

    The returned function waits and returns what has arrived. Received tensors have the dtype and
    device of ``like``.
    """
    transport, ranks, device = current(), group.ranks, like.device
    going = [(ranks[to], x) for to, x in sends]
    if not transport.records and transport.overlaps(ranks, device.type):
        sent = [transport.send(x, to, _LABEL) for to, x in going]
        coming = [
            transport.receive(shape, like.dtype, ranks[source], _LABEL, device)
            for source, shape in receives
        ]

        def wait() -> list[Tensor]:
            arrived = [handle.wait() for handle in coming]
            for handle in sent:
                handle.wait()
            return arrived

        return wait
    wanted = [(ranks[source], shape, like.dtype) for source, shape in receives]
    return lambda: transport.exchange(going, wanted, ranks, device)


def _taken(x: Tensor, held: Runs) -> Tensor:
    """Return the rows of ``x`` in the ranges ``held`` of its shard, concatenated."""
    parts = [x.narrow(-2, start, size) for start, size in held]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -2)


def _of_mask(mask: Tensor, block: Block) -> Tensor:
    """Return the part of a mask for one block.

    The mask has this rank's rows and all keys; either dim may have size 1.
    """
    rows = slice(None) if mask.shape[-2] == 1 else block.row_slice
    first = block.at[1]
    keys = (
        slice(None) if mask.shape[-1] == 1 else slice(first, first + block.keys[1] - block.keys[0])
    )
    return mask[..., rows, keys]
