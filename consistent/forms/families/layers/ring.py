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

from ....spec import Runs, intersect_runs, item_count
from ....spec.cut import merge_runs
from . import sight as seeing
from .block_attention import (
    BlockOptions,
    Drop,
    Grads,
    attend,
    attend_backward,
    merge_block,
    repeat_heads,
    sum_head_groups,
)
from .sight import Block, Sight

Arriving = Callable[[], list[Tensor]]
_MESSAGE_LABEL = "keys of attention"
_MAX_GAP = 16  # unseen keys between two runs are sent as well if there are fewer than this
_MAX_KEY_BYTES = 1 << 21  # bytes of a rank's keys above which the heads are processed in groups
_HEAD_GROUPS = 4


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

    def needed_keys(self, rank: int, source: int) -> Runs:
        """Return which keys of the shard of ``source`` the rows of ``rank`` attend to.

        As (start, size) ranges of the shard. Both ranks are indices in the group.
        """
        group = self.group
        runs = seeing.needed_keys(self.sight, group.rows[rank], group.keys[source])
        if self.by_mask is None:
            return runs
        return _intersection(runs, to_shard_positions(self.by_mask[rank], group.keys[source]))

    def steps(self) -> list[int]:
        """Return the steps of the ring in which at least one rank is sent keys.

        All ranks skip the other steps.
        """
        count = len(self.group.ranks)
        return [step for step in range(1, count)
                if any(self.needed_keys(k, (k + step) % count) for k in range(count))]  # fmt: skip

    def blocks(self, source: int, joins: bool) -> tuple[Block, ...]:
        """Return the blocks of attention that this rank computes with the keys of ``source``.

        Positions of keys are those in the shard, or in the buffer received from another rank. With
        ``joins``, adjacent rectangles are merged.
        """
        group = self.group
        result = seeing.blocks(self.sight, group.rows[group.me], group.keys[source], joins)
        if source == group.me:
            return result
        return seeing.to_buffer_positions(result, self.needed_keys(group.me, source))


# -- by values -------------------------------------------------------------------------------------


def needs_of(group: Group, sight: Sight, mask: Tensor | None) -> Needs:
    """Return which keys the rows of each rank attend to.

    If ``mask`` is given, with this rank's rows and all keys, the ranks exchange which keys any of
    their rows attends to.
    """
    if mask is None:
        return Needs(group, sight)
    is_seen = mask if mask.dtype is torch.bool else mask != -math.inf
    is_seen = is_seen.reshape(-1, is_seen.shape[-1]).any(0)
    keys = sum(item_count(runs) for runs in group.keys)
    own_keys = is_seen.expand(keys).to(torch.uint8)
    masks = current().all_gather(
        own_keys.contiguous(), [own_keys.shape] * len(group.ranks), group.ranks
    )
    return Needs(group, sight, tuple(_nonzero_runs(each) for each in masks))


def _nonzero_runs(is_nonzero: Tensor) -> Runs:
    """Return the (start, size) ranges of nonzero elements of the vector ``is_nonzero``.

    Gaps of fewer than ``_MAX_GAP`` elements are included, so that few ranges are sent.
    """
    places = is_nonzero.nonzero().flatten().cpu()
    if not len(places):
        return ()
    breaks = (places.diff() > _MAX_GAP).nonzero().flatten()
    firsts = places[torch.cat([breaks.new_zeros(1), breaks + 1])].tolist()
    lasts = places[torch.cat([breaks, breaks.new_tensor([len(places) - 1])])].tolist()
    return tuple((a, b + 1 - a) for a, b in zip(firsts, lasts, strict=True))


def to_shard_positions(logical: Runs, held: Runs) -> Runs:
    """Return the part of the ranges ``logical`` that a shard has, as positions in the shard.

    ``held`` are the ranges of the logical tensor that the shard stores, one after the other:
    logical ((4, 2),) in a shard of ((0, 2), (4, 2)) is ((2, 2),).
    """
    runs, place = [], 0
    for start, size in held:
        for a, n in intersect_runs(logical, ((start, size),)):
            runs.append((place + a - start, n))
        place += size
    return merge_runs(runs)


def _intersection(a: Runs, b: Runs) -> Runs:
    return merge_runs(intersect_runs(a, b))


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
        wide = _accumulation_dtype(query.dtype)
        out = query.new_zeros((*query.shape[:-1], value.shape[-1]), dtype=wide)
        total = query.new_full(query.shape[:-1], -math.inf, dtype=wide)
        for heads in self._head_groups(query, key):
            operands = heads(query, key, value, out, total)
            self._forward_heads(*operands, mask=heads.of_mask(mask))
        return out.to(query.dtype), total

    def _forward_heads(
        self, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor,
        mask: Tensor | None,
    ) -> None:  # fmt: skip
        for step, pair in self._keys_by_step(key, value):
            for block in self._blocks_of_step(step, mask):
                options, rows = self._block_options(block, mask, query.device), block.row_slice
                part = attend(query[..., rows, :], *self._block_keys(block, pair, query), options)
                merge_block(out[..., rows, :], total[..., rows], *part)
                del part  # so that results of two blocks are never in memory at once

    def backward(
        self, grad: Tensor, query: Tensor, key: Tensor, value: Tensor, out: Tensor, total: Tensor,
        mask: Tensor | None, with_mask_grad: bool,
    ) -> list[Tensor]:  # fmt: skip
        """Return the gradients of query, key and value, and of the mask if ``with_mask_grad``.

        ``grad`` is the gradient of ``out``; ``out`` and ``total`` are what ``forward`` has
        returned.
        """
        # Contiguous, because compiled programs expect contiguous results from a message.
        sums = [x.new_zeros(x.shape, dtype=total.dtype) for x in (query, key, value)]
        mask_grad = mask.new_zeros(mask.shape) if with_mask_grad and mask is not None else None
        for heads in self._head_groups(query, key):
            operands = heads(grad, query, key, value, out, total)
            self._backward_heads(
                operands, heads.of_mask(mask), heads(*sums), heads.of_mask(mask_grad)
            )
        grads = [x.to(y.dtype) for x, y in zip(sums, (query, key, value), strict=True)]
        return grads if mask_grad is None else [*grads, mask_grad]

    def _backward_heads(
        self, operands: Sequence[Tensor], mask: Tensor | None, sums: Sequence[Tensor],
        mask_grad: Tensor | None,
    ) -> None:  # fmt: skip
        grad, query, key, value, out, total = operands
        query_grad, *key_grads = sums
        grad_return = _GradReturn(self.needs, key_grads, key)
        for step, pair in self._keys_by_step(key, value):
            step_grads = key_grads if step == 0 else []
            for block in self._blocks_of_step(step, mask):
                options, rows = self._block_options(block, mask, query.device), block.row_slice
                grads = attend_backward(
                    grad[..., rows, :], query[..., rows, :], *self._block_keys(block, pair, query),
                    out[..., rows, :], total[..., rows], options,
                    with_score_grad=mask_grad is not None,
                )  # fmt: skip
                query_grad[..., rows, :] += grads.query
                step_grads = _add_block_grads(grads, block, step_grads, pair)
                if mask_grad is not None and grads.scores is not None:
                    part_of_mask = _mask_of_block(mask_grad, block)
                    part_of_mask += grads.scores.sum_to_size(part_of_mask.shape)
                del grads
            if step:
                has_keys = pair[0].shape[-2] > 0
                key_value_grads = [x.to(key.dtype) for x in step_grads] or [
                    torch.zeros_like(x) for x in pair
                ]
                grad_return.start(step, key_value_grads if has_keys else [])
        grad_return.finish()

    def _head_groups(self, query: Tensor, key: Tensor) -> list[_HeadGroup]:
        """Return the groups of heads to process one after the other; often one group of all heads.

        For long sequences a group has a few heads, whose keys are sent in one message, so that
        little memory is held in addition to the operands.
        """
        heads, group = key.shape[-3], self.needs.group
        keys = sum(item_count(runs) for runs in group.keys)
        nbytes = keys * key.shape[-1] * key.element_size() * heads * key.shape[:-3].numel()
        count = math.gcd(heads, _HEAD_GROUPS) if nbytes > _MAX_KEY_BYTES * len(group.ranks) else 1
        count = 1 if self.drop is not None else count
        return [_HeadGroup(query.ndim - 3, i, count) for i in range(count)]

    def _block_keys(
        self, block: Block, pair: Sequence[Tensor], query: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return the keys and values of a block, with one head for each head of ``query``.

        ``pair`` are all keys and values that this rank has received in the step.
        """
        key, value = (repeat_heads(x[..., block.key_slice, :], query) for x in pair)
        return key, value

    def _blocks_of_step(self, step: int, mask: Tensor | None) -> Iterator[Block]:
        """Yield the blocks to compute with the keys that arrive in a step.

        Blocks in which the mask hides every key are left out.
        """
        joins = mask is None and self.drop is None
        source = (self.needs.group.me + step) % len(self.needs.group.ranks)
        for block in self.needs.blocks(source, joins):
            if self.needs.by_mask is not None and mask is not None:
                part = _mask_of_block(mask, block)
                if not (part if part.dtype is torch.bool else part != -math.inf).any():
                    continue
            yield block

    def _block_options(
        self, block: Block, mask: Tensor | None, device: torch.device
    ) -> BlockOptions:
        """Return the options by which ``block`` is computed: its scale, bias and dropout."""
        bias = seeing.band_mask(block, device) if mask is None else _mask_of_block(mask, block)
        if bias is not None and bias.dtype is torch.bool:
            bias = torch.zeros_like(bias, dtype=torch.float32).masked_fill_(~bias, -math.inf)
        return BlockOptions(self.scale, block.triangle, bias, self.drop, block.position)

    def _keys_by_step(self, key: Tensor, value: Tensor) -> Iterator[tuple[int, list[Tensor]]]:
        """Yield (step, [keys, values] that arrived in it), from step 0 with this rank's own keys.

        If a step brings none to this rank, the tensors are empty. Where the transport overlaps
        messages with compute, the next keys travel while the caller works on these.
        """
        steps = self.needs.steps()
        pending = self._start_step(steps[0], key, value) if steps else None
        yield 0, [key, value]
        for step, next_step in zip(steps, [*steps[1:], None]):
            assert pending is not None
            arrived, pending = pending(), None  # drops the reference to what was sent
            if next_step is not None:
                pending = self._start_step(next_step, key, value)
            yield step, arrived or [key[..., :0, :], value[..., :0, :]]

    def _start_step(self, step: int, key: Tensor, value: Tensor) -> Arriving:
        """Start to send and receive the keys of ring step ``step``; return a function to wait."""
        needs, count, me = self.needs, len(self.needs.group.ranks), self.needs.group.me
        target, source = (me - step) % count, (me + step) % count
        sent_runs, received_count = (
            needs.needed_keys(target, me),
            item_count(needs.needed_keys(me, source)),
        )
        sends = [(target, _rows_in_runs(x, sent_runs)) for x in (key, value)] if sent_runs else []
        shapes = (
            [(*x.shape[:-2], received_count, x.shape[-1]) for x in (key, value)]
            if received_count
            else []
        )
        return _start_exchange(needs.group, sends, [(source, shape) for shape in shapes], key)


@dataclass(frozen=True)
class _HeadGroup:
    """One of ``count`` groups of heads, as a function that selects these heads of tensors.

    ``index`` is the group's number. ``dim`` is the heads dim of all tensors except a mask.
    """

    dim: int
    index: int
    count: int

    def __call__(self, *tensors: Tensor) -> Any:
        """Return each tensor narrowed to the heads of this group."""
        return [self._narrow_to_group(x, self.dim) for x in tensors]

    def of_mask(self, mask: Tensor | None) -> Tensor | None:
        """Return ``mask`` narrowed to the heads of this group.

        A mask has rows and keys as its last dims. If it has one head for all, or no heads dim, it
        is returned as it is.
        """
        if mask is None or mask.ndim < 3 or mask.shape[-3] == 1:
            return mask
        return self._narrow_to_group(mask, mask.ndim - 3)

    def _narrow_to_group(self, x: Tensor, dim: int) -> Tensor:
        size = x.shape[dim] // self.count
        return x if self.count == 1 else x.narrow(dim, size * self.index, size)


def _add_block_grads(
    grads: Grads, block: Block, sums: Sequence[Tensor], pair: Sequence[Tensor]
) -> Sequence[Tensor]:
    """Add the gradients of a block to the ``sums`` of keys and values, and return them.

    ``sums`` is empty before the first block. ``pair`` are the keys and values.
    """
    grads_by_operand = [
        sum_head_groups(x, y.shape[-3]) for x, y in zip((grads.key, grads.value), pair, strict=True)
    ]
    if not sums:
        if block.keys == (0, pair[0].shape[-2]):
            return grads_by_operand
        sums = [torch.zeros_like(x, dtype=_accumulation_dtype(x.dtype)) for x in pair]
    for x, place in zip(grads_by_operand, sums, strict=True):
        place[..., block.key_slice, :] += x
    return sums


def _accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which sums of ``dtype`` are accumulated."""
    return torch.promote_types(dtype, torch.float32)


class _GradReturn:
    """Sends gradients of keys and values back to the ranks that own the keys, and receives them.

    They travel in the dtype of ``key`` and are accumulated in ``sums``, in the dtype of ``sums``.
    """

    def __init__(self, needs: Needs, sums: Sequence[Tensor], key: Tensor) -> None:
        self._needs, self._sums, self._key = needs, sums, key
        self._pending: tuple[Runs, Arriving] | None = None

    def start(self, step: int, grads: Sequence[Tensor]) -> None:
        """Start to send ``grads`` of the keys received in ``step`` to the owner of these keys."""
        group, count = self._needs.group, len(self._needs.group.ranks)
        target, source = (group.me + step) % count, (group.me - step) % count
        runs = self._needs.needed_keys(source, group.me)
        shapes = (
            [(*x.shape[:-2], item_count(runs), x.shape[-1]) for x in self._sums] if runs else []
        )
        wait = _start_exchange(
            group, [(target, x) for x in grads], [(source, shape) for shape in shapes], self._key
        )
        self.finish()  # after the start, so that two steps of gradients overlap
        self._pending = runs, wait

    def finish(self) -> None:
        """Wait for the gradients that the last ``start`` requested, and add them to ``sums``."""
        if self._pending is not None:
            runs, wait = self._pending
            self._pending = None
            self._add_grads(runs, wait())

    def _add_grads(self, runs: Runs, grads: Sequence[Tensor]) -> None:
        for total, x in zip(self._sums, grads):
            place = 0
            for start, size in runs:
                total[..., start : start + size, :] += x[..., place : place + size, :]
                place += size


def _start_exchange(
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
    outgoing = [(ranks[target], x) for target, x in sends]
    if not transport.records and transport.overlaps(ranks, device.type):
        send_handles = [transport.send(x, target, _MESSAGE_LABEL) for target, x in outgoing]
        receive_handles = [
            transport.receive(shape, like.dtype, ranks[source], _MESSAGE_LABEL, device)
            for source, shape in receives
        ]

        def wait() -> list[Tensor]:
            arrived = [handle.wait() for handle in receive_handles]
            for handle in send_handles:
                handle.wait()
            return arrived

        return wait
    incoming = [(ranks[source], shape, like.dtype) for source, shape in receives]
    return lambda: transport.exchange(outgoing, incoming, ranks, device)


def _rows_in_runs(x: Tensor, runs: Runs) -> Tensor:
    """Return the rows of ``x`` in the ranges ``runs`` of its shard, concatenated."""
    parts = [x.narrow(-2, start, size) for start, size in runs]
    return parts[0].contiguous() if len(parts) == 1 else torch.cat(parts, -2)


def _mask_of_block(mask: Tensor, block: Block) -> Tensor:
    """Return the part of a mask for one block.

    The mask has this rank's rows and all keys; either dim may have size 1.
    """
    rows = slice(None) if mask.shape[-2] == 1 else block.row_slice
    first = block.position[1]
    keys = (
        slice(None) if mask.shape[-1] == 1 else slice(first, first + block.keys[1] - block.keys[0])
    )
    return mask[..., rows, keys]
