"""Cut a batch along dim 0 into micro-batches, and join their results.

```
batch    [10, 8] -- 4 micro-batches --> [3, 8] [3, 8] [2, 8] [2, 8]
loss     mean of 10 rows            <-- 3/10 of the first, 3/10 of the second, ...
logits   [10, 5]                    <-- [3, 5] [3, 5] [2, 5] [2, 5], in order
```
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..spec import piece
from ..spec.nested import map_tensors, tensors_in


def rows_of(what: str, arguments: Any) -> int:
    """Return the number of rows (the size of dim 0) of the batch in ``arguments``.

    A tensor may have a single row instead, which holds for the whole batch. Tensors without dims
    are ignored. ``what`` is the caller's name, for errors.

    Raises:
        ValueError: there is no tensor with rows, or tensors have different numbers of rows.
    """
    sizes = [x.shape[0] for x in tensors_in(arguments) if x.ndim]
    rows = max(sizes, default=0)
    if rows == 0:
        raise ValueError(
            f"{what}: no argument is a tensor with rows, and micro-batches are cut along dim 0.\n"
            "  Pass the batch as tensors of shape [rows, ...]."
        )
    if not set(sizes) <= {rows, 1}:
        raise ValueError(
            f"{what}: its tensors have {sorted(set(sizes))} rows in dim 0, and micro-batches are "
            "cut along dim 0.\n  Every tensor has one row for each sample, or a single row that "
            "holds for all.\n  Make what is not a batch an attribute of the module."
        )
    return rows


def micro_batch_ranges(what: str, rows: int, count: int) -> list[tuple[int, int]]:
    """Return (start, size) of each micro-batch; sizes differ by at most one row.

    10 rows in 4 -> (0, 3), (3, 3), (6, 2), (8, 2). ``what`` is the caller's name, for errors.

    Raises:
        ValueError: there are fewer rows than micro-batches.
    """
    if rows < count:
        raise ValueError(
            f"{what}: a batch of {rows} rows is to be cut into {count} micro-batches, and each has "
            "at least one row. Give a larger batch, or fewer micro-batches."
        )
    return [piece(rows, count, k) for k in range(count)]


def narrow_batch(arguments: Any, rows: int, start: int, size: int) -> Any:
    """Return one micro-batch of ``arguments``: ``size`` rows of each tensor, from ``start`` on.

    Only tensors with ``rows`` rows are cut; others stay as they are. Global tensors keep their SBP.
    """
    if size == rows:
        return arguments

    def cut_tensor(x: torch.Tensor) -> Any:
        if x.ndim == 0 or x.shape[0] != rows:
            return x
        # Narrowing may change the layout of a global tensor that is split along dim 0.
        narrowed: Any = x.narrow(0, start, size)
        return narrowed.to_global(sbp=x.sbp) if is_global(x) else narrowed  # type: ignore[attr-defined]

    return map_tensors(arguments, cut_tensor)


def join_results(what: str, results: Sequence[Any], sizes: Sequence[int]) -> Any:
    """Join the results of the micro-batches, which have ``sizes`` rows, into one result.

    Tensors with a row for each sample are concatenated. Tensors without dims become their mean,
    weighted by rows. Everything else is taken from the first result.

    Raises:
        ValueError: the results differ in their number of tensors, or a tensor has dims but not a
            row for each sample, or is a whole number without dims.
    """
    if len(results) == 1:
        return results[0]
    lists = [tensors_in(result) for result in results]
    if len({len(tensors) for tensors in lists}) > 1:
        counts = [len(tensors) for tensors in lists]
        raise ValueError(
            f"{what}: its results for the micro-batches hold {counts} tensors, and they are joined "
            "tensor by tensor. Return the same structure for each."
        )
    joint = iter([_join_tensors(what, list(parts), sizes) for parts in zip(*lists, strict=True)])
    return map_tensors(results[0], lambda _: next(joint))


def _join_tensors(what: str, parts: list[Any], sizes: Sequence[int]) -> Any:
    """Return one tensor of the batch's result from its ``parts``, one for each micro-batch."""
    total = sum(sizes)
    if all(x.ndim == 0 for x in parts):
        if not (parts[0].is_floating_point() or parts[0].is_complex()):
            raise ValueError(
                f"{what}: it returns a tensor without dims of {parts[0].dtype} for each "
                "micro-batch, and a mean of such is none.\n  Return numbers as floats, or one row "
                "for each sample."
            )
        scaled = [x.detach() * (n / total) for x, n in zip(parts, sizes, strict=True)]
        return sum(scaled[1:], scaled[0])
    for x, n in zip(parts, sizes, strict=True):
        if x.ndim == 0 or x.shape[0] != n:
            raise ValueError(
                f"{what}: it returns a tensor of shape {tuple(x.shape)} for a micro-batch of {n} "
                "rows, which has not a row for each sample.\n  Results of micro-batches are joined "
                "along dim 0.\n  Return tensors of shape [rows, ...], and losses without dims."
            )
    concatenated: Any = torch.cat([x.detach() for x in parts])
    return concatenated.to_global(sbp=parts[0].sbp) if is_global(concatenated) else concatenated
