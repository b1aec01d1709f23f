"""Conditions under which derived signatures hold: dtypes, numbers and sizes of a call."""

from __future__ import annotations

import cmath
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from ...spec import EXTREMES, NdSbp, P, S, Sbp, Split
from ...spec.sbp import partial_max, partial_min
from ..signature import Call, Signature
from .given import HALVES, DerivationResult
from .rule import Rule
from .sends import can_leave_result_split, join_bytes, sent_bytes

_OPPOSITE_EXTREME: dict[Sbp, Sbp] = {partial_max: partial_min, partial_min: partial_max}


def passes_partial(rule: Rule, call: Call) -> bool:
    """Return whether P may pass through ``call``: the op on addends gives addends of its result.

    It may not if the dtype of the result rounds (an integer result of float operands, a
    half-precision result of wider ones), or if a number among the arguments is infinite.
    """
    results = [out.dtype for out in call.outs if out.dtype is not torch.bool]
    if any(not is_integral(x.spec.dtype) for x in call.operands) or "rounds" in rule.flags:
        if results and is_integral(results[0]):
            return False
    if (
        results
        and results[0] in HALVES
        and any(_is_wider_than_half(x.spec.dtype) for x in call.operands)
    ):
        return False
    return all(cmath.isfinite(x) for x in _floats_in((*call.args, *call.kwargs.values())))


def _is_wider_than_half(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 2


def _floats_in(values: Iterable[Any]) -> Iterator[float | complex]:
    """Yield the floats and complex numbers among ``values``, also from nested tuples and lists."""
    for value in values:
        if isinstance(value, float | complex):
            yield value
        elif isinstance(value, tuple | list):
            yield from _floats_in(value)


def keeps_order(signature: Signature, call: Call) -> bool:
    """Return whether ``call`` keeps order, if the signature passes P(max) or P(min).

    A call with one operand that changes its dtype does not, such as ``any`` of numbers: -1 is less
    than 0, and True is greater than False.
    """
    has_extreme = (
        any(entry.is_extreme for entry in side) for side in (signature.ins, signature.outs)
    )
    if not all(has_extreme):
        return True
    (first, *others), (out, *_) = call.operands, call.outs
    return bool(others) or first.spec.dtype is out.dtype


def monotone_signatures(rule: Rule, call: Call) -> list[Signature]:
    """Return the P(max) and P(min) signatures of a rule with the flag "rises" or "falls".

    "rises" says that the op is increasing, which gives ``P(max) -> P(max)``; "falls" that it is
    decreasing, which gives ``P(max) -> P(min)``. There are none for casts that may drop bits, or
    for the negation of integers, which overflows for the smallest one.
    """
    source, result = call.operands[0].spec.dtype, call.outs[0].dtype
    if "rises" in rule.flags and (source in (result, torch.bool) or result.is_floating_point):
        return [call.new_signature({0: kind}, kind) for kind in EXTREMES]
    if "falls" in rule.flags and (source is torch.bool or result.is_floating_point):
        return [call.new_signature({0: kind}, _OPPOSITE_EXTREME[kind]) for kind in EXTREMES]
    return []


def extreme_variants(signatures: Iterable[Signature]) -> list[Signature]:
    """Return variants of the ``signatures`` that pass P, with P(max) and with P(min).

    They hold for an op that only moves elements: ``P -> P`` gives ``P(max) -> P(max)``.
    """

    def replace_partial(kind: Sbp, entries: NdSbp) -> NdSbp:
        return tuple(kind if e is P else e for e in entries)

    return [
        Signature(replace_partial(kind, s.ins), replace_partial(kind, s.outs))
        for s in signatures
        if P in s.ins and s.form is None
        for kind in EXTREMES
    ]


def has_no_empty_part(signature: Signature, derived: DerivationResult, call: Call) -> bool:
    """Return whether every rank gets an item of each dim that may not be empty ("n!" in the rule).

    A dim that ``signature`` splits must have an item for each rank of the placement, because other
    axes may split it too.
    """
    return all(
        not isinstance(entry, Split)
        or (x.index, entry.dim) not in derived.never_empty_dims
        or x.shape[entry.dim] >= x.spec.placement.size
        for x, entry in zip(call.operands, signature.ins, strict=True)
    )


def with_sent_bytes(
    signature: Signature, rule: Rule, derived: DerivationResult, call: Call, parts: int
) -> Signature:
    """Return ``signature`` with the bytes that its form sends, on an axis of ``parts`` ranks.

    It is marked ``by_size`` if sizes decide whether it holds.
    """
    splits = [(i, entry.dim) for i, entry in enumerate(signature.ins) if isinstance(entry, Split)]
    by_size = any(split in derived.never_empty_dims for split in splits)
    by_size |= bool(splits) and "sizes may differ" in rule.flags
    if signature.form is None:
        return replace(signature, by_size=True) if by_size else signature
    count = join_bytes if signature in derived.joined_signatures else sent_bytes
    nbytes = count(signature, call, parts)
    return replace(signature, nbytes=nbytes, by_size=by_size) if nbytes or by_size else signature


def split_result_variants(signature: Signature, call: Call, parts: int) -> list[Signature]:
    """Return variants of ``signature`` whose result is split: each rank joins only its part of it.

    They send a fraction of the bytes. There is none on a placement of several axes, where another
    axis could split the same dim, nor with ``keepdim``, where the whole result will be combined
    with the operand again.
    """
    assert signature.form is not None
    keepdim = "keepdim" in call.params and bool(call.get("keepdim"))
    shape = call.outs[0].shape
    place = max(range(len(shape)), key=lambda d: (shape[d], -d), default=0)  # first longest dim
    if not can_leave_result_split(signature.form) or keepdim or not shape or shape[place] < parts:
        return []
    if call.operands[0].spec.placement.ndim > 1:
        return []
    signature = replace(signature, nbytes=signature.nbytes // parts, by_size=True)
    return [replace(signature, outs=(S(place),) * len(signature.outs))]


def is_integral(dtype: torch.dtype) -> bool:
    """Return whether ``dtype`` is an integer or bool dtype, which has no infinite values."""
    return not (dtype.is_floating_point or dtype.is_complex)
