"""Forms of ops whose output length depends on values: nonzero, masked_select, unique, bincount.

They return (result, logical shapes), because the shapes are known only after the op has run. Ranks
exchange how many items each has found. Then the found rows are redistributed into balanced pieces,
or the ranks' results are joined.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....rules.families.indexing.data_dependent import FORM, operand_and_mask
from ....rules.signature import is_split
from ....spec import TensorSpec
from ...even_out import balance_rows, gather_ints, gather_rows
from ...join_results import index_and_count
from ...registry import Shards, form

Shapes = list[tuple[int, ...]]


def _balance_rows(shard: Shards, rows: list[Tensor]) -> tuple[list[Tensor], Shapes]:
    """Redistribute the rows that all ranks found, such as nonzero elements, into balanced pieces.

    ``rows`` are the tensors, of equal length, that this rank found, one per output. Returns (this
    rank's pieces, logical shapes of the outputs).
    """
    # Ranks find different rows only along the axes that split the result's rows.
    axes = tuple(a for a in shard.axes if is_split(shard.outs[0].sbp[a], 0))
    row_call = replace(shard, axes=axes)
    row_counts = [n for (n,) in gather_ints(row_call, [len(rows[0])], rows[0].device)]
    pieces, shapes = [], []
    for x, out in zip(rows, shard.outs, strict=True):
        shape = (sum(row_counts), *out.shape[1:])
        spec = TensorSpec.of(shard.placement, out.sbp, shape, out.dtype)
        boxes = [spec.region(shard.placement.coordinate_of(rank)) for rank in row_call.ranks]
        pieces.append(
            balance_rows(
                row_call, x, row_counts, [(starts[0], sizes[0]) for starts, sizes in boxes]
            )
        )
        shapes.append(shape)
    return pieces, shapes


@form(FORM)
def _masked_select(shard: Shards) -> tuple[Tensor, Shapes]:
    """Run masked_select or x[mask] on the shard, and balance the selected rows over the ranks.

    Returns (this rank's rows, logical shapes of the outputs), as all forms in this file do.
    """
    pair = operand_and_mask(shard.call)
    assert pair is not None
    x, mask = (shard.tensors[operand.index] for operand in pair)
    (selected,), shapes = _balance_rows(shard, [x[mask]])
    return selected, shapes


@form("nonzero")
def _nonzero(shard: Shards) -> tuple[Any, Shapes]:
    """Find the nonzero elements of the shard, by logical index, and balance them over the ranks.

    The form of nonzero, argwhere and ``where`` with one argument.
    """
    start = shard.region()[0][0]
    if shard.call.name == "where" or shard.kwargs.get("as_tuple", False):
        first, *rest = shard.tensors[0].nonzero(as_tuple=True)
        pieces, shapes = _balance_rows(shard, [first + start, *rest])
        return tuple(pieces), shapes
    rows = shard.tensors[0].nonzero()
    rows[:, 0] += start
    (pieces,), shapes = _balance_rows(shard, [rows])
    return pieces, shapes


@form("unique")
def _unique(shard: Shards) -> tuple[tuple[Tensor, Tensor, Tensor], Shapes]:
    """Run unique on each shard, and then on the gathered unique values of all ranks.

    Returns ((values, inverse, counts), logical shapes), with inverse and counts as the call
    requests them.
    """
    x = shard.tensors[0].detach()
    inverse, counts = (bool(shard.get(n, False)) for n in ("return_inverse", "return_counts"))
    flags = {"return_inverse": inverse, "return_counts": counts}
    values, places, repeats = torch.ops.aten._unique2(x, **flags)
    value_counts = [n for (n,) in gather_ints(shard, [len(values)], x.device)]
    all_values = torch.cat(gather_rows(shard, values, value_counts))
    values, joint_index, _ = torch.ops.aten._unique2(all_values, return_inverse=True)
    if counts:
        total = torch.zeros_like(values, dtype=torch.int64)
        repeats = total.index_add(
            0, joint_index, torch.cat(gather_rows(shard, repeats, value_counts))
        )
    if inverse:
        # This rank's part of ``joint_index`` maps its own unique values to the joint unique values.
        places = joint_index.split(value_counts)[index_and_count(shard)[0]][places]
    shapes = [tuple(values.shape), tuple(shard.outs[1].shape), tuple(repeats.shape)]
    return (values, places, repeats), shapes


@form("bincount")
def _bincount(shard: Shards) -> tuple[Tensor, Shapes]:
    x, weights = shard.tensors[0], shard.get("weights")
    ends = [-int(x.min()), int(x.max())] if x.numel() else [0, -1]
    low, high = (max(each) for each in zip(*gather_ints(shard, ends, x.device), strict=True))
    if low > 0:  # low is the same on every rank, so all ranks raise together
        raise RuntimeError(
            f"bincount: the input holds {-low}, and counts are of the numbers from 0 on. "
            "Shift it first: bincount(x - x.min())."
        )
    n = max(shard.get("minlength", 0), high + 1)
    counts = torch.bincount(x, weights, minlength=n).to(shard.outs[0].dtype)
    return counts, [(n,)]
