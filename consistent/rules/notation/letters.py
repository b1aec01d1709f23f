"""Names of dims: the letters of a rule written out for operands of given shapes.

``...`` gives the names ".1", ".0", counted from the right, so that operands that broadcast line up.
A capital letter gives "D.1", "D.0" for the dims that the argument names, counted in the same way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..signature import DoesNotFit
from .rule import DOTS, REST, Pattern, Rule

Names = tuple[str, ...]


def letter_of(name: str) -> str:
    """Return the letter of the rule that a dim's name comes from.

    "m" -> "m", "D.1" -> "D", ".0" -> "...".
    """
    head, dot, _ = name.partition(".")
    return head or DOTS if dot else name


@dataclass(frozen=True, slots=True)
class DimNames:
    """Names of the dims of each operand and output of a call, see the top of this file.

    The rule "...D -> ..." for 3 dims and D = dim 1 has the operand (".2", "D.1", ".0") and the
    output (".2", ".0"). With keepdim the output is (".2", "", ".0"). The names of an output end
    early if the rule says that any dims may follow ("_").
    """

    ins: tuple[Names, ...]
    outs: tuple[Names, ...]


def name_dims(
    rule: Rule,
    patterns: Sequence[Pattern],
    ndims: Sequence[int],
    along: tuple[int, ...] | None,
    keepdim: bool,
) -> DimNames:
    """Return the names of the dims of all operands and outputs of a call.

    Args:
        rule: the rule, for its outputs.
        patterns: patterns of the operands that the call has.
        ndims: their numbers of dims.
        along: the dims that capital letters stand for, as the call counts them; None for all.
        keepdim: whether a reduced dim that capital letters stand for stays with size 1.

    Raises:
        DoesNotFit: an operand has another number of dims than its pattern.
    """
    ndims_with_dots = [n for p, n in zip(patterns, ndims, strict=True) if DOTS in p.names]
    max_ndim = max(ndims_with_dots, default=0)
    from_right = _dims_from_right(along, max_ndim)
    ins = [_operand_names(p, n, from_right) for p, n in zip(patterns, ndims, strict=True)]
    has_capital = any(dim.is_named_by_argument for p in patterns for dim in p.dims)
    outs = []
    for pattern in (pattern for out in rule.outs for pattern in out.patterns):
        if has_capital:
            outs.append(_output_names(pattern, max_ndim, from_right, keepdim))
        elif any(dim.is_named_by_argument for dim in pattern.dims):
            outs.append(_names_with_inserted_dim(pattern, max_ndim, along))
        else:
            outs.append(_names_without_capitals(pattern, _longest_dots(ins, patterns)))
    return DimNames(tuple(ins), tuple(outs))


def _dims_from_right(along: tuple[int, ...] | None, n: int) -> tuple[int, ...]:
    """Return the dims ``along`` of ``n`` dims (None for all), counted from the right.

    Of 3 dims, (0, -1) -> (2, 0).
    """
    dims = range(n) if along is None else sorted({d % n for d in along} if n else ())
    return tuple(n - 1 - d for d in dims)


def _operand_names(pattern: Pattern, ndim: int, along: tuple[int, ...]) -> Names:
    """Return the dim names of an operand with ``ndim`` dims.

    ``along`` has the dims that a capital letter stands for, counted from the right.
    """
    capital = next((dim.name for dim in pattern.dims if dim.is_named_by_argument), "")
    if DOTS not in pattern.names:
        names = [f"{capital}.{r}" for r in along] if capital else list(pattern.names)
        if len(names) != ndim:
            raise DoesNotFit(f"a pattern of {len(names)} letters meets {ndim} dims")
        return tuple(names)
    if capital:
        places = reversed(range(ndim))
        return tuple(f"{capital}.{r}" if r in along else f".{r}" for r in places)
    return _names_without_capitals(pattern, ndim - len(pattern.dims) + 1)


def _names_without_capitals(pattern: Pattern, dots_ndim: int) -> Names:
    """Return the dim names of a pattern without capitals; ``...`` stands for ``dots_ndim`` dims.

    "...mk" with 2 dims in front gives (".1", ".0", "m", "k"). Names end at "_", which is any dims.
    """
    if dots_ndim < 0:
        raise DoesNotFit(f"a pattern of {len(pattern.dims) - 1} letters meets fewer dims")
    names: list[str] = []
    for name in pattern.names:
        if name == REST:
            break
        names += [f".{r}" for r in reversed(range(dots_ndim))] if name == DOTS else [name]
    return tuple(names)


def _longest_dots(ins: Sequence[Names], patterns: Sequence[Pattern]) -> int:
    """Return how many dims the longest ``...`` among the operands stands for.

    Operands broadcast, so it is the ``...`` of the outputs.
    """
    lengths = [
        len(names) - len(p.dims) + 1
        for names, p in zip(ins, patterns, strict=True)
        if DOTS in p.names
    ]
    return max(lengths, default=0)


def _output_names(pattern: Pattern, n: int, along: tuple[int, ...], keepdim: bool) -> Names:
    """Return the names of an output's dims if an argument names dims of the operands.

    In the output these dims have a capital letter too, or stay with size 1, or are dropped. ``n``
    is the number of dims, and ``along`` are the named ones, counted from the right.
    """
    if DOTS not in pattern.names:
        return _names_without_capitals(pattern, 0)
    capital = next((dim.name for dim in pattern.dims if dim.is_named_by_argument), "")
    names = []
    for r in reversed(range(n)):
        if r not in along:
            names.append(f".{r}")
        elif capital or keepdim:
            names.append(f"{capital}.{r}" if capital else "")
    return tuple(names)


def _names_with_inserted_dim(pattern: Pattern, n: int, along: tuple[int, ...] | None) -> Names:
    """Return the dim names of an output with a new dim at the position that an argument names.

    "...* -> ...[D]" of stack: for 2 dims and ``along`` (0,) it is ("D.", ".1", ".0").
    """
    capital = next(dim.name for dim in pattern.dims if dim.is_named_by_argument)
    names = [f".{r}" for r in reversed(range(n))]
    for d in along or ():
        names.insert(d % (n + 1), f"{capital}.")
    return tuple(names)
