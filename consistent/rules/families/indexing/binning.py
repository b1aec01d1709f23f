"""Rules of ops that count: elements of a table below a value, or elements in each bin.

Every input may be split along any dim: each rank counts its own elements, and the counts add up.
"""

from __future__ import annotations

import torch

from ....spec import B, P, S
from ....spec.sbp import partial_max, partial_min
from ...signature import Call, Operand, Out, Signature
from ...table import Row, add_rows


def isin(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of isin: elements, which are independent, may be split.

    If the test elements are split, each rank searches its own, and an element is found if any rank
    finds it: ``B, S(0) -> P(max)``, or P(min) with ``invert``.
    """
    signatures = [call.broadcast_signature()]
    x, y = call.get("elements"), call.get("test_elements")
    kind = partial_min if call.get("invert", False) else partial_max
    if isinstance(x, Operand):
        signatures += [call.new_signature({x.index: S(d)}, S(d)) for d in range(x.ndim)]
    if isinstance(y, Operand):
        signatures += [call.new_signature({y.index: S(d)}, kind) for d in range(y.ndim)]
    return signatures


def histogram(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of histogram: ``S(d) -> P, B`` for any dim d of the input.

    Each rank counts its own elements, so the counts are P; the edges of the bins are B. Weights are
    split like the input.
    """
    weight = call.kwargs.get("weight")
    signatures = [call.broadcast_signature()]
    for d in range(call.operands[0].ndim):
        ins = {0: S(d), **({weight.index: S(d)} if isinstance(weight, Operand) else {})}
        signatures.append(call.new_signature(ins, (P, B), "histogram", 16))
    return signatures


def _histogram_outs(call: Call) -> tuple[Out, ...]:
    """Return the outputs (counts, edges of the bins); torch has no histogram of meta tensors."""
    bins, dtype = call.get("bins"), call.operands[0].spec.dtype
    n = bins.shape[0] - 1 if isinstance(bins, Operand) else bins
    return tuple(Out(torch.Size([k]), dtype, non_differentiable=True) for k in (n, n + 1))


ROWS = (
    # A position in a sorted table is the number of items before it; the ranks' numbers add up.
    Row("bucketize", "f(..., b) -> ...", "input boundaries"),
    Row("histc", "f(...) -> [b]; ... by histc", "input bins min max", by_value=True),
    Row("histogram", histogram, "input bins", outs=_histogram_outs),
    Row("isin", isin, "elements test_elements assume_unique invert", makes_extremes=True),
    Row(
        "searchsorted",
        ("f(b, ...) -> ...; unless sorter", "f(...b, ...[v]) -> ...[v]; unless sorter",
         "f(...[b], ...[v], sorter:...[b]) -> ...[v]"),
        "sorted_sequence input sorter",
    ),
)  # fmt: skip

add_rows(ROWS)
