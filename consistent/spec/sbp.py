"""SBP: how the ranks along one placement axis hold a tensor: split, broadcast or partial.

* ``S(d)`` (sharded) cuts tensor dim ``d`` over the ranks of the axis. Pieces are balanced;
  ``cut.py`` has other ways to divide the dim.
* ``B`` (replicated) gives every rank the whole tensor.
* ``P`` (partial sum) gives every rank an addend of the tensor.
* ``P(max)`` and ``P(min)``, the *extremes*, give every rank a tensor of which the elementwise
  largest, or smallest, is the value. They have no gradient.

An *nd-sbp* is a tuple with one entry per placement axis. Axes that split the same dim split it in
axis order, outer axis first. All partial axes are partial in the same way, because sums and maxima
do not commute.

SBPs print as they are typed, and parse from what they print: ``parse(str(x)) == x``.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Union

import torch

from .cut import CUT_PATTERN, DimCut, Runs, cut_of, parse_cut, piece
from .elsewhere import PART_HINTS, module_getattr
from .nearest import nearest_sbp


class Sbp:
    """How the ranks of one placement axis hold a tensor: one entry of an nd-sbp (layout per axis).

    Instances are interned, so ``is`` and ``==`` agree.
    """

    __slots__ = ()

    is_split = False
    is_broadcast = False
    is_partial = False
    is_extreme = False

    def __copy__(self) -> Sbp:
        return self

    def __deepcopy__(self, memo: dict) -> Sbp:
        return self


class Split(Sbp):
    """``S(dim)``, sharded: tensor dim ``dim`` is divided among the ranks of the axis.

    Negative dims count from the end. ``cut`` says how the dim is divided if pieces are not
    balanced.
    """

    __slots__ = ("__weakref__", "cut", "dim")
    is_split = True
    _instances: dict[int, Split] = {}
    # Weak values, unlike _instances: a program may keep using new sizes, and so new cuts.
    _instances_by_cut: weakref.WeakValueDictionary[tuple[int, DimCut], Split] = (
        weakref.WeakValueDictionary()
    )
    dim: int
    cut: DimCut | None  # None: pieces are balanced

    def __new__(cls, dim: int, cut: DimCut | None = None) -> Split:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(
                f"split: dim is {dim!r} of type {type(dim).__name__}, and a dim is an int. "
                "Write sbp.split(0), or S(0)."
            )
        instance = cls._instances.get(dim) if cut is None else cls._instances_by_cut.get((dim, cut))
        if instance is None:
            instance = super().__new__(cls)
            object.__setattr__(instance, "dim", dim)
            object.__setattr__(instance, "cut", cut)
            if cut is None:
                return cls._instances.setdefault(dim, instance)
            return cls._instances_by_cut.setdefault((dim, cut), instance)
        return instance

    def size(self, n: int, parts: int, index: int) -> int:
        """Return how many of ``n`` items rank ``index`` of ``parts`` holds.

        ``S(0).size(5, 2, 0)`` is 3.
        """
        if self.cut is None:
            return piece(n, parts, index)[1]
        return self.cut.size(n, parts, index)

    def runs(self, n: int, parts: int, index: int) -> Runs:
        """Return the runs, (start, size), of ``n`` items that rank ``index`` of ``parts`` holds.

        Balanced pieces are one run: ``S(0).runs(5, 2, 1)`` is ((3, 2),).
        """
        return (piece(n, parts, index),) if self.cut is None else self.cut.runs(n, parts, index)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} is a value and cannot be changed; write S(new_dim).")

    def __reduce__(self) -> tuple:
        return (Split, (self.dim,) if self.cut is None else (self.dim, self.cut))

    def __repr__(self) -> str:
        return f"S({self.dim})" if self.cut is None else f"S({self.dim}, {self.cut})"


class Broadcast(Sbp):
    """``B``, replicated: every rank of the axis holds the whole tensor."""

    __slots__ = ()
    is_broadcast = True

    def __call__(self) -> Broadcast:
        return self

    def __reduce__(self) -> str:
        return "broadcast"

    def __repr__(self) -> str:
        return "B"


class Partial(Sbp):
    """``P``, partial sum: every rank of the axis holds an addend; the tensor is their sum.

    ``P(max)`` and ``P(min)``: the tensor is the elementwise largest, or smallest, of what the ranks
    hold.
    """

    __slots__ = ("op",)
    is_partial = True
    _instances: dict[str, Partial] = {}
    op: str

    def __new__(cls, op: str) -> Partial:
        instance = cls._instances.get(op)
        if instance is None:
            instance = super().__new__(cls)
            object.__setattr__(instance, "op", op)
            cls._instances[op] = instance
        return instance

    @property
    def is_extreme(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        """True for ``P(max)`` and ``P(min)``."""
        return self.op != "sum"

    def __call__(self, op: Any = None) -> Partial:
        """Return the partial that is combined by ``op``: ``P(max)``, ``P(min)``, or ``P()``, a sum.

        ``op`` may also be the name of the function, such as ``"max"``.
        """
        if op is None:
            return self
        name = op if isinstance(op, str) else getattr(op, "__name__", None)
        if name not in ("sum", "max", "min"):
            raise ValueError(
                f"partial: ranks' tensors are to be combined by {op!r}, and P knows sum, max and "
                'min. Write P, P("max") or P("min").'
            )
        return Partial(name)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{self} is a value and cannot be changed; write P, P(max), P(min).")

    def __reduce__(self) -> tuple:
        return (Partial, (self.op,))

    def __repr__(self) -> str:
        return "P" if self.op == "sum" else f"P({self.op})"


def split(
    dim: int,
    *,
    blocks: int | None = None,
    cut: str | None = None,
    sizes: Sequence[int] | None = None,
    of: int | Sequence[int] | None = None,
) -> Split:
    """Return ``S(dim)``, sharded: each rank of the axis holds a piece along ``dim``, in rank order.

    Of n = q·k + r items on k ranks the first r ranks hold q + 1, the others q. Negative dims count
    from the end.

    Args:
        blocks: number of items in a block; the blocks of the dim are dealt to the ranks in turn.
        cut: ``"zigzag"``: 2k chunks, of which rank r has the r-th from the front and the r-th from
            the end.
        sizes: number of items of each rank; give the same tuple on every rank.
        of: divide each run of this many items, or each part of these sizes, separately.

    Raises:
        TypeError: ``dim`` or a size is not an int.
        ValueError: a size is negative, or two of ``blocks``, ``cut`` and ``sizes`` are given.
    """
    if blocks is cut is sizes is of is None:
        return Split(dim)
    return Split(dim, cut_of(blocks, cut, sizes, of))


broadcast = Broadcast()
partial_sum = Partial("sum")
partial_max = Partial("max")
partial_min = Partial("min")

EXTREMES = (partial_max, partial_min)

S = split
"""``S(dim)``: each rank of the axis holds a piece along tensor dim ``dim``, in rank order."""

B = broadcast
"""``B``: every rank of the axis holds the whole tensor."""

P = partial_sum
"""``P``: every rank of the axis holds an addend, and the tensor is their sum.

``P(max)`` and ``P(min)``: the tensor is the elementwise largest, or smallest, of what they hold.
"""

NdSbp = tuple[Sbp, ...]
SbpLike = Union[Sbp, str, int, Sequence[Union[Sbp, str, int]]]  # noqa: UP007  (used at run time on 3.11)

_DUAL: dict[Sbp, Sbp] = {broadcast: partial_sum, partial_sum: broadcast}
# Groups: dim of a split, the arguments after it, B, op of P(op), op of partial_op, P.
_ENTRY = re.compile(
    rf"\s*(?:(?:S\(|split\()\s*(?:dim\s*=\s*)?(-?\d+)({CUT_PATTERN})\s*,?\s*\)"
    r"|(B|broadcast)|P\(\s*(sum|max|min)\s*\)|partial_(sum|max|min)|(P))\s*"
)


def dual(value: Sbp) -> Sbp:
    """Return the SBP of the gradient of a tensor with SBP ``value``: S -> S, B -> P, P -> B.

    If every rank uses the same tensor (B), each computes an addend of its gradient (P), and vice
    versa.

    Raises:
        ValueError: ``value`` is P(max) or P(min). There the gradient belongs to the rank that holds
            the extreme element, and no rank alone knows which one does.

    Source: spmd_types, docs/design.md (Meta), whose R and P are B and P here.
    """
    if value.is_extreme:
        raise ValueError(
            f"{value}: it has no gradient, for no rank knows alone which of them holds the "
            f"{'largest' if value is partial_max else 'smallest'} value.\n"
            "  Box it before gradients are asked for: x.to_global(sbp=B)."
        )
    return _DUAL.get(value, value)


def dual_nd(values: NdSbp) -> NdSbp:
    """Return the SBPs of the gradient of a tensor with these SBPs: (B, S(0)) -> (P, S(0))."""
    return tuple(dual(value) for value in values)


def partial_of(values: NdSbp) -> Partial | None:
    """Return the first partial SBP, such as ``P`` or ``P(max)``; None if no axis is partial.

    It stands for all of them, since all partial axes of a tensor are of one kind.
    """
    return next((entry for entry in values if isinstance(entry, Partial)), None)


def has_one_partial_kind(values: NdSbp) -> bool:
    """Return whether all partial axes are of one kind: all P, all P(max) or all P(min).

    A mixture would be ambiguous: a maximum of sums is not a sum of maxima.
    """
    return len({entry for entry in values if entry.is_partial}) < 2


def is_cut(values: NdSbp) -> bool:
    """Return whether some axis has a cut, such as ``S(0, cut="zigzag")``, so is not balanced."""
    return any(isinstance(entry, Split) and entry.cut is not None for entry in values)


def cuts_are_innermost(values: NdSbp) -> bool:
    """Return whether no axis splits a dim further that an earlier axis has cut unevenly.

    Specs require it: ``(S(0), S(0, blocks=2))`` is allowed, and ``(S(0, blocks=2), S(0))`` is not.
    """
    cut_dims: set[int] = set()
    for entry in values:
        if isinstance(entry, Split):
            if entry.dim in cut_dims:
                return False
            if entry.cut is not None:
                cut_dims.add(entry.dim)
    return True


def without_cut(entry: Sbp) -> Sbp:
    """Return ``entry`` with balanced pieces: ``S(0, blocks=2)`` -> ``S(0)``; others stay."""
    return Split(entry.dim) if isinstance(entry, Split) and entry.cut is not None else entry


def sbp_text(entries: NdSbp) -> str:
    """Return SBPs as text: ``S(0)`` for one axis, ``(S(0), B)`` for two."""
    return str(entries[0]) if len(entries) == 1 else str(entries)


def without_cuts(values: NdSbp) -> NdSbp:
    """Return ``values`` with balanced pieces: (S(0, blocks=2), B) -> (S(0), B)."""
    return tuple(without_cut(entry) for entry in values)


def fits_dtype(entry: Sbp, dtype: torch.dtype) -> bool:
    """Return whether tensors of ``dtype`` may have SBP ``entry``.

    P needs a sum, which bools do not have; P(max) and P(min) need an order, which complex numbers
    do not have.
    """
    if entry.is_extreme:
        return not dtype.is_complex
    return entry is not partial_sum or dtype is not torch.bool


def parse(text: str) -> Sbp | NdSbp:
    """Return the SBP or nd-sbp that prints as ``text``: ``"(S(0), B)"`` -> ``(S(0), B)``.

    Raises:
        ValueError: the text is not an SBP; the message shows it with a caret under the fault.
    """
    is_tuple = text.strip().startswith("(")
    start = text.index("(") + 1 if is_tuple else 0
    end = len(text.rstrip())
    if is_tuple:
        if text.count("(") != text.count(")"):
            raise _parse_error(text, end)
        if text[end - 1] != ")":
            after = text.rindex(")") + 1
            raise _parse_error(text, len(text) - len(text[after:].lstrip()))
        end -= 1
    entries: list[Sbp] = []
    position = start
    while position < end and text[position:end].strip():
        match = _ENTRY.match(text, position, end)
        if match is None:
            raise _parse_error(text, position)
        entries.append(_entry_from_match(match))
        position = match.end()
        if position < end:
            if text[position] != ",":
                raise _parse_error(text, position)
            position += 1
    if not entries and not is_tuple:
        raise _parse_error(text, start)
    if not is_tuple and len(entries) == 1 and not text.rstrip().endswith(","):
        return entries[0]
    return tuple(entries)


def _entry_from_match(match: re.Match) -> Sbp:
    """Return the SBP that a match of the pattern ``_ENTRY`` stands for."""
    dim, words, is_b, op, long_op, _ = match.groups()
    if dim is not None:
        return Split(int(dim), parse_cut(words))
    return broadcast if is_b else Partial(op or long_op or "sum")


def _parse_error(text: str, position: int) -> ValueError:
    begin = text.rfind(",", 0, position) + 1 or len(text) - len(text.lstrip(" ("))
    is_word = position <= begin + 1 or text[position : position + 1] == "("
    nearest = nearest_sbp(text[begin:].partition(",")[0]) if is_word else None
    return ValueError(
        f"sbp: cannot read this text as an SBP:\n  {text}\n  {' ' * position}^\n"
        + (f"Did you mean {nearest!r}? " if nearest else "")
        + 'An SBP is "S(dim)", "B", "P", "P(max)" or "P(min)", and for several axes a tuple such '
        'as "(S(0), B)".'
    )


def as_nd_sbp(value: SbpLike) -> NdSbp:
    """Return ``value`` as an nd-sbp, a tuple of ``Sbp``.

    ``value`` is an SBP, its text, the dim that it splits, or a sequence of these: ``S(0)``,
    ``"S(0)"``, ``0`` and ``[0]`` all give ``(S(0),)``.

    Raises:
        TypeError: ``value`` is none of these; the message says what to write.
        ValueError: the text is not an SBP.
    """
    if isinstance(value, Sbp):
        return (value,)
    if isinstance(value, str):
        parsed = parse(value)
        return parsed if isinstance(parsed, tuple) else (parsed,)
    if isinstance(value, tuple | list):
        return tuple(_as_entry(entry) for entry in value)
    return (_as_entry(value),)


def as_sbp(value: SbpLike) -> Sbp:
    """Return the SBP of one axis from any form that ``as_nd_sbp`` accepts.

    Raises:
        TypeError: ``value`` is not an SBP, or has several entries.
    """
    entries = as_nd_sbp(value)
    if len(entries) != 1:
        raise TypeError(
            f"sbp: got {value!r}, which has {len(entries)} entries, where one axis is asked for. "
            "Give the SBP of that axis, such as S(0)."
        )
    return entries[0]


def _as_entry(entry: Any) -> Sbp:
    """Return one entry, an SBP, its text or the dim that it splits, as an ``Sbp``.

    Raises:
        TypeError: it is none of these, such as a ``Shard`` of DTensor.
        ValueError: it is a text that is not an SBP.
    """
    if isinstance(entry, int) and not isinstance(entry, bool):
        return Split(entry)
    parsed = parse(entry) if isinstance(entry, str) else entry
    if not isinstance(parsed, Sbp):
        is_from_dtensor = type(entry).__module__.startswith("torch.distributed")  # such as Shard(0)
        nearest = nearest_sbp(repr(entry)) if is_from_dtensor else None
        raise TypeError(
            f"sbp: got {entry!r} of type {type(entry).__name__}, which is not an SBP. "
            + (f"It is called {nearest} here. " if nearest else "")
            + 'Give S(dim), B or P, their text ("S(0)"), or the dim that is split (0); on several '
            "axes a tuple with one for each."
        )
    return parsed


if not TYPE_CHECKING:
    __getattr__ = module_getattr(
        "consistent.sbp", PART_HINTS, ("split", "broadcast", "partial_sum")
    )
