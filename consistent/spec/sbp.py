"""SBP: how one axis of a placement holds a tensor — split, broadcast or partial_sum.

``S(d)`` cuts tensor dim ``d`` over the ranks of the axis, ``B`` gives every rank the whole tensor,
``P`` gives every rank an addend of it. An *nd-sbp* is a tuple with one entry per placement axis;
axes that split the same dim split it in axis order, outer axis first.

Values print as they are typed and parse from what they print: ``parse(str(x)) == x``.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Union


class Sbp:
    """One entry of an nd-sbp. Instances are interned, so ``is`` and ``==`` agree."""

    __slots__ = ()

    is_split = False
    is_broadcast = False
    is_partial = False

    def __copy__(self) -> Sbp:
        return self

    def __deepcopy__(self, memo: dict) -> Sbp:
        return self


class Split(Sbp):
    """``S(dim)``: tensor dim ``dim`` is cut over the axis. Negative dims count from the end."""

    __slots__ = ("dim",)
    is_split = True
    _made: dict[int, Split] = {}
    dim: int

    def __new__(cls, dim: int) -> Split:
        if isinstance(dim, bool) or not isinstance(dim, int):
            raise TypeError(
                f"split: dim is {dim!r} of type {type(dim).__name__}, and a dim is an int. "
                "Write sbp.split(0), or S(0)."
            )
        made = cls._made.get(dim)
        if made is None:
            made = super().__new__(cls)
            object.__setattr__(made, "dim", dim)
            cls._made[dim] = made
        return made

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"S({self.dim}) is a value and cannot be changed; write S(new_dim).")

    def __reduce__(self) -> tuple:
        return (Split, (self.dim,))

    def __repr__(self) -> str:
        return f"S({self.dim})"


class Broadcast(Sbp):
    """``B``: every rank of the axis holds the whole tensor."""

    __slots__ = ()
    is_broadcast = True

    def __call__(self) -> Broadcast:
        return self

    def __reduce__(self) -> str:
        return "broadcast"

    def __repr__(self) -> str:
        return "B"


class Partial(Sbp):
    """``P``: every rank of the axis holds an addend; the tensor is their sum."""

    __slots__ = ()
    is_partial = True

    def __call__(self) -> Partial:
        return self

    def __reduce__(self) -> str:
        return "partial_sum"

    def __repr__(self) -> str:
        return "P"


def split(dim: int) -> Split:
    """``S(dim)``."""
    return Split(dim)


broadcast = Broadcast()
partial_sum = Partial()

S = split
B = broadcast
P = partial_sum

NdSbp = tuple[Sbp, ...]
SbpLike = Union[Sbp, str, Sequence[Union[Sbp, str]]]  # noqa: UP007  (used at run time on 3.11)

_DUAL: dict[Sbp, Sbp] = {broadcast: partial_sum, partial_sum: broadcast}
_ENTRY = re.compile(
    r"\s*(?:S\(\s*(-?\d+)\s*\)|split\(\s*(?:dim\s*=\s*)?(-?\d+)\s*\)"
    r"|(B|broadcast)|(P|partial_sum))\s*"
)


def dual(value: Sbp) -> Sbp:
    """The SBP that the gradient of a tensor with SBP ``value`` has: S -> S, B -> P, P -> B.

    Source: spmd_types, docs/design.md (Meta), where R and P are what is B and P here.
    """
    return _DUAL.get(value, value)


def dual_nd(values: NdSbp) -> NdSbp:
    """``dual`` of each entry."""
    return tuple(dual(value) for value in values)


def parse(text: str) -> Sbp | NdSbp:
    """Read what printing wrote: ``"S(0)"`` -> ``S(0)``, ``"(S(0), B)"`` -> ``(S(0), B)``.

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
        first, second, is_b, is_p = match.groups()
        dim = first if first is not None else second
        entries.append(Split(int(dim)) if dim is not None else broadcast if is_b else partial_sum)
        position = match.end()
        if position < end:
            if text[position] != ",":
                raise _parse_error(text, position)
            position += 1
    if not entries and not is_tuple:
        raise _parse_error(text, start)
    if not is_tuple and len(entries) == 1 and "," not in text:
        return entries[0]
    return tuple(entries)


def _parse_error(text: str, position: int) -> ValueError:
    return ValueError(
        f"sbp: cannot read this text as an SBP:\n  {text}\n  {' ' * position}^\n"
        'An SBP is "S(dim)", "B" or "P", and for several axes a tuple such as "(S(0), B)".'
    )


def as_nd_sbp(value: SbpLike) -> NdSbp:
    """A single SBP, its text, or a sequence of them, as a tuple of ``Sbp``."""
    if isinstance(value, Sbp):
        return (value,)
    if isinstance(value, str):
        parsed = parse(value)
        return parsed if isinstance(parsed, tuple) else (parsed,)
    if isinstance(value, tuple | list):
        return tuple(_one(entry) for entry in value)
    raise TypeError(
        f"sbp: got {value!r} of type {type(value).__name__}, which is not an SBP. "
        "Use sbp.split(dim), sbp.broadcast or sbp.partial_sum, or a tuple of them, one per "
        "placement axis."
    )


def _one(entry: Sbp | str) -> Sbp:
    if isinstance(entry, Sbp):
        return entry
    parsed = parse(entry) if isinstance(entry, str) else entry
    if not isinstance(parsed, Sbp):
        raise TypeError(
            f"sbp: got {entry!r} among the entries of an nd-sbp, which is not an SBP. "
            "Give one of sbp.split(dim), sbp.broadcast or sbp.partial_sum per placement axis."
        )
    return parsed
