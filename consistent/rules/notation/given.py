"""The input and the output of a derivation, as values that can be compared and cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..signature import Signature
from .letters import Names, Spelled, spell
from .rule import Pattern, Rule

# Stand for an operand that is not a tensor: a number by which P may be multiplied, or may not.
NUMBER, UNSAFE_NUMBER = "number", "unsafe number"
# Torch accumulates in float32 and then rounds to these.
HALVES = (torch.float16, torch.bfloat16)
# How a loss is reduced: torch's enumeration.
NONE, MEAN, SUM = 0, 1, 2
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Given:
    """The input of a derivation: the operands in the rule's order, and facts from other arguments.

    Args:
        places: for each operand of the rule that the call has, its place in the rule.
        order: its place among the operands of the call; -1 for a number.
        shapes: its shape, or what kind of number it is.
        whole_numbers: whether its dtype is one of whole numbers, none of which is infinite.
        asked: which outputs were asked for; the others are empty.
    """

    places: tuple[int, ...]
    order: tuple[int, ...]
    shapes: tuple[Shape | str, ...]
    whole_numbers: tuple[bool, ...]
    asked: tuple[bool, ...]
    along: tuple[int, ...] | None = ()
    keepdim: bool = False
    reduction: int = NONE


@dataclass(frozen=True, slots=True)
class Derived:
    """The signatures; which of them hold by linearity; which join results; dims of operands that
    may not be split into empty parts; dims of the first that are fetched, and that are whole."""

    signatures: tuple[Signature, ...]
    linear: frozenset[Signature]
    joined: frozenset[Signature]
    filled: frozenset[tuple[int, int]]
    fetched: tuple[int, ...]
    whole: tuple[int, ...]


def spell_given(rule: Rule, given: Given) -> tuple[Spelled, list[int]]:
    """The names of all dims, and which of ``given`` are tensors."""
    tensors = [i for i, shape in enumerate(given.shapes) if not isinstance(shape, str)]
    patterns: list[Pattern] = [rule.operands[given.places[i]][2] for i in tensors]
    ndims = [len(given.shapes[i]) for i in tensors]
    return spell(rule, patterns, ndims, given.along, given.keepdim), tensors


def sizes_of(operands: Sequence[tuple[Names, Shape]]) -> dict[str, int]:
    """Logical size of each letter: 1 gives way to any other size."""
    sizes: dict[str, int] = {}
    for names, shape in operands:
        for name, n in zip(names, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = n
    return sizes
