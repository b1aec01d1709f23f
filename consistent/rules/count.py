"""Ops that count: how many of a table lie below, how many fall into each bin.

Every input may be split along any dim: what the ranks count of their own adds up.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..spec import B, P, S
from ..spec.sbp import partial_max, partial_min
from .signature import Call, Operand, Out, Signature
from .table import Row, add_rows


def searched(values: str, table: str) -> Callable[[Call, int], list[Signature]]:
    """searchsorted, bucketize: each of ``values`` by itself. Its place in the table is how many
    come before it, so a split table gives P."""

    def signatures(call: Call, parts: int) -> list[Signature]:
        made = [call.whole()]
        x, y = call.get(values), call.get(table)
        if isinstance(y, Operand) and not call.kwargs.get("sorter"):
            made.append(call.make({y.index: S(y.ndim - 1)}, P))
        if not isinstance(x, Operand):
            return made
        if isinstance(y, Operand) and y.ndim > 1:
            every = range(len(call.operands))
            return made + [call.make(dict.fromkeys(every, S(d)), S(d)) for d in range(x.ndim - 1)]
        return made + [call.make({x.index: S(d)}, S(d)) for d in range(x.ndim)]

    return signatures


def among(call: Call, parts: int) -> list[Signature]:
    """isin: each element by itself. Found on some rank, it is found; missed by all, it is not."""
    made = [call.whole()]
    x, y = call.get("elements"), call.get("test_elements")
    kind = partial_min if call.get("invert", False) else partial_max
    if isinstance(x, Operand):
        made += [call.make({x.index: S(d)}, S(d)) for d in range(x.ndim)]
    if isinstance(y, Operand):
        made += [call.make({y.index: S(d)}, kind) for d in range(y.ndim)]
    return made


def histc(call: Call, parts: int) -> list[Signature]:
    """histc: counts add up. The range is that of the whole where the call gives none."""
    low, high = call.get("min", 0), call.get("max", 0)
    form, nbytes = (None, 0) if low != high else ("histc", 16)
    return [
        call.whole(),
        *(call.make({0: S(d)}, P, form, nbytes) for d in range(call.operands[0].ndim)),
    ]


def histogram(call: Call, parts: int) -> list[Signature]:
    """histogram, its weights split alike: (counts, edges of the bins)."""
    weight = call.kwargs.get("weight")
    made = [call.whole()]
    for d in range(call.operands[0].ndim):
        ins = {0: S(d), **({weight.index: S(d)} if isinstance(weight, Operand) else {})}
        made.append(call.make(ins, (P, B), "histogram", 16))
    return made


def _histogram_outs(call: Call) -> tuple[Out, ...]:
    """Counts and edges: torch has no histogram of meta tensors."""
    bins, dtype = call.get("bins"), call.operands[0].spec.dtype
    n = bins.shape[0] - 1 if isinstance(bins, Operand) else bins
    return tuple(Out(torch.Size([k]), dtype, fixed=True) for k in (n, n + 1))


ROWS = (
    Row("bucketize", searched("input", "boundaries"), "input boundaries"),
    Row("histc", histc, "input bins min max", by_value=True),
    Row("histogram", histogram, "input bins", outs=_histogram_outs),
    Row("isin", among, "elements test_elements assume_unique invert", forward=True),
    Row("searchsorted", searched("input", "sorted_sequence"), "sorted_sequence input"),
)

add_rows(ROWS)
