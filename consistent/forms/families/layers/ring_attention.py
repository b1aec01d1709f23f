"""Attention whose rows and keys are split in the same way, so that no rank ever has all keys.

There are two forms. Either each rank's keys and values go round a ring (``ring.py``), or an
all-to-all brings whole sequences of some heads to each rank, and another all-to-all takes the
result back. The split may have any cut. Under a causal mask a contiguous run of rows and a run of
keys are either the same or one is wholly before the other: their scores form a rectangle, a
triangle or nothing, and no mask tensor is made. With ``S(d, cut="zigzag")`` each rank then has the
same work in each step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from mirrored.transports.default import current

from ....movement import differentiable
from ....spec import Runs, S, Split, TensorSpec
from ...random.draw import key_of
from ...random.dropout import apply_dropout_to_runs
from ...random.generator import RngState
from ...registry import Shards, form
from .ring import Group, Needs, Ring, needs_of
from .sight import Sight, single_document


@form("ring_attention")
def ring_attention(shard: Shards) -> Tensor:
    """Compute ``softmax(scale q k^T + mask) v`` by passing keys and values round the ranks.

    Each rank computes the result for its own rows and never has all keys at once.
    """
    query, key, value = (shard.get(name) for name in ("query", "key", "value"))
    mask, p = shard.get("attn_mask"), shard.get("dropout_p", 0.0)
    random = key_of(shard) if p else None
    if shard.coordinate is None:
        return empty_output(shard, [x for x in (query, key, value, mask) if x is not None])
    group = group_of(shard, -2)
    rows, keys = (shard.specs[i].shape[-2] for i in (0, 1))
    round_ = Round(
        group, scale_of(shard, query),
        single_document(rows, keys, bool(shard.get("is_causal", False))),
        masked=mask is not None, drop=None if random is None else _block_dropout(shard, p, random),
    )  # fmt: skip
    return attend_round(round_, query, key, value, () if mask is None else (mask,))[0]


@form("heads_attention")
def heads_attention(shard: Shards) -> Tensor:
    """Compute attention on whole sequences of some heads, between two all-to-alls.

    The first gathers the sequences and splits the heads; the second splits the result by rows
    again.
    """
    head_split = S(shard.specs[0].ndim - 3)
    axes = [a for a in shard.axes if _splits_rows(shard, a)]
    head_specs = [
        _replace_entries(spec, axes, head_split) for spec in (*shard.specs[:3], shard.outs[0])
    ]
    query, key, value = (
        differentiable.box(x, src, dst)
        for x, src, dst in zip(shard.tensors[:3], shard.specs, head_specs, strict=False)
    )
    out = shard.run(
        query, key, value, shard.get("attn_mask"), is_causal=shard.get("is_causal", False),
        scale=shard.get("scale"), enable_gqa=shard.get("enable_gqa", False),
    )  # fmt: skip
    return differentiable.box(out, head_specs[-1], shard.outs[0])


def _replace_entries(spec: TensorSpec, axes: Sequence[int], entry: Any) -> TensorSpec:
    """Return ``spec`` with the SBP ``entry`` on ``axes``."""
    return spec.with_sbp(tuple(entry if a in axes else e for a, e in enumerate(spec.sbp)))


# -- who holds what --------------------------------------------------------------------------------


def _splits_rows(shard: Shards, axis: int, dim: int = -2) -> bool:
    """Return whether ``axis`` splits the keys along the sequence dim ``dim``."""
    entry = shard.specs[1].sbp[axis]
    return isinstance(entry, Split) and entry.dim == dim % shard.specs[1].ndim


def group_of(shard: Shards, dim: int) -> Group:
    """Return the ranks that pass keys to each other, with the rows and keys that each holds.

    ``dim`` is the sequence dim of query and keys.
    """
    axes = tuple(a for a in shard.axes if _splits_rows(shard, a, dim))
    ranks = replace(shard, axes=axes).ranks
    coordinates = [shard.placement.coordinate_of(rank) for rank in ranks]
    rows, keys = ([spec.runs(c)[dim] for c in coordinates] for spec in shard.specs[:2])
    return Group(ranks, coordinates.index(shard.coordinate), tuple(rows), tuple(keys))


def scale_of(shard: Shards, query: Tensor) -> float:
    """Return the factor of the scores: the call's ``scale``, or 1 / sqrt(head size)."""
    scale = shard.get("scale")
    return 1 / math.sqrt(query.shape[-1]) if scale is None else scale


def empty_output(shard: Shards, inputs: Sequence[Tensor], index: int = 0) -> Tensor:
    """Return output ``index`` on a rank outside the placement, which has no values to compute.

    Its autograd graph reaches all tensors in ``inputs`` that need a gradient, so that such a rank
    runs the same backward pass.
    """
    spec = shard.outs[index]
    out = torch.empty(shard.out_shape(index), dtype=spec.dtype, device=inputs[0].device)
    sums = [x.sum() for x in inputs if x.requires_grad]
    return out + sum(sums[1:], sums[0]).to(out.dtype) if sums else out


@dataclass(frozen=True)
class _BlockDropout:
    """Applies dropout to a block of probabilities, by a mask that depends on logical indices only.

    Called with the probabilities and the logical (row, key) of the first.
    """

    p: float
    random: RngState
    lead: tuple[Runs, ...]  # runs of the dims before rows and keys
    sizes: tuple[int, ...]

    def __call__(self, probabilities: Tensor, position: tuple[int, int]) -> Tensor:
        block_runs = [((a, n),) for a, n in zip(position, probabilities.shape[-2:], strict=True)]
        return apply_dropout_to_runs(
            probabilities, self.p, [*self.lead, *block_runs], self.sizes, self.random
        )


def _block_dropout(shard: Shards, p: float, random: RngState) -> _BlockDropout:
    """Return the dropout of this call's probabilities, as a function of a block of them.

    ``p`` is the fraction to drop, ``random`` the random key.
    """
    lead = tuple(shard.outs[0].runs(shard.coordinate)[:-2])
    sizes = (*shard.outs[0].shape[:-1], shard.specs[1].shape[-2])
    return _BlockDropout(p, random, lead, sizes)


# -- under autograd --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Round:
    """Description of one ring attention, without its operands.

    Its ``repr`` shows everything but values, since it names the op in a recorded step. ``sight``
    says which keys rows attend to; it may be a ``Reads``, which makes a ``Sight`` from the starts
    of documents. With ``masked``, a mask tensor [this rank's rows, all keys] is applied, too.
    """

    group: Group
    scale: float
    sight: Sight | Any
    masked: bool = False
    drop: _BlockDropout | None = None

    def ring(self, given: Sequence[Tensor]) -> tuple[Ring, Tensor | None]:
        """Return (the ``Ring`` to run, the mask or None).

        ``given`` are the tensors that decide which keys are attended to: the mask, or the starts of
        documents.
        """
        mask = given[0] if self.masked else None
        sight: Sight = self.sight if isinstance(self.sight, tuple) else self.sight.read(*given)
        # In a recorded step, message sizes may depend on values only inside ``as_one`` (``run``).
        is_read = mask is not None and not current().records
        needs = needs_of(self.group, sight, mask) if is_read else Needs(self.group, sight)
        return Ring(needs, self.scale, self.drop), mask

    def run(self, function: Any, xs: list[Tensor]) -> list[Tensor]:
        """Run ``function(xs)``, the forward or backward pass as a function of tensors.

        A recorded step records it as one op, except with dropout.
        """
        if self.drop is not None:
            return function(xs)
        return current().as_one(function, xs, self.group.ranks)


@dataclass(frozen=True)
class _Forward:
    """The forward pass of a ``Round``, as a function of a list of tensors."""

    round: Round

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        query, key, value, *mask_or_starts = xs
        ring, mask = self.round.ring(mask_or_starts)
        return list(ring.forward(query, key, value, mask))


@dataclass(frozen=True)
class _Backward:
    """The backward pass of a ``Round``, as a function of a list of tensors."""

    round: Round
    of_mask: bool

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        grad, query, key, value, out, total, *mask_or_starts = xs
        ring, mask = self.round.ring(mask_or_starts)
        return ring.backward(grad, query, key, value, out, total, mask, self.of_mask)


class _RingAttention(torch.autograd.Function):
    """Autograd Function of ``attend_round``."""

    @staticmethod
    def forward(
        ctx: Any, round_: Round, query: Tensor, key: Tensor, value: Tensor, *mask_or_starts: Tensor
    ) -> tuple[Tensor, Tensor]:
        out, total = round_.run(_Forward(round_), [query, key, value, *mask_or_starts])
        ctx.save_for_backward(query, key, value, out, total, *mask_or_starts)
        ctx.mark_non_differentiable(total)
        ctx.round = round_
        return out, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        mask_or_starts = ctx.saved_tensors[5:]
        of_mask = ctx.round.masked and ctx.needs_input_grad[4]
        backward_pass = _Backward(ctx.round, of_mask)
        # Ends with that of the mask, if of_mask.
        grads = ctx.round.run(backward_pass, [grad, *ctx.saved_tensors])
        return None, *grads, *[None] * (len(mask_or_starts) - of_mask)


def attend_round(
    round_: Round, query: Tensor, key: Tensor, value: Tensor, given: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """Run the ring attention ``round_``; return (result, log-sum-exp of each row).

    The result is differentiable in the operands. ``given`` are the further tensors that ``round_``
    reads: the mask, or the starts of documents.
    """
    return _RingAttention.apply(round_, query, key, value, *given)
