"""Input and output of a derivation (``derive.py``), as values that can be compared and cached."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..signature import Signature
from .letters import DimNames, Names, name_dims
from .rule import Pattern, Rule

# In place of the shape of an operand that is a number: one by which P may be multiplied, or not.
NUMBER, UNSAFE_NUMBER = "number", "unsafe number"
# Dtypes for which torch accumulates in float32 and rounds at the end.
HALVES = (torch.float16, torch.bfloat16)
# Reductions of a loss, numbered as in torch.
NONE, MEAN, SUM = 0, 1, 2
Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DerivationInput:
    """Input of a derivation: what it depends on of a call, as a key of the cache of ``derive``.

    Args:
        rule_positions: for each operand of the rule that the call has, its position in the rule.
        operand_indices: for each, its index among the operands of the call; -1 for a number.
        shapes: for each, its shape, with 2 for sizes over 1, or which kind of number it is.
        whole_numbers: for each, whether it has an integer or bool dtype, which has no infinite
            values.
        requested_outs: for each output, whether the call requests it; the others are empty.
        along: the dims that capital letters stand for; None for all.
        keepdim: whether reduced dims stay with size 1.
        reduction: the reduction of a loss.
    """

    rule_positions: tuple[int, ...]
    operand_indices: tuple[int, ...]
    shapes: tuple[Shape | str, ...]
    whole_numbers: tuple[bool, ...]
    requested_outs: tuple[bool, ...]
    along: tuple[int, ...] | None = ()
    keepdim: bool = False
    reduction: int = NONE


@dataclass(frozen=True, slots=True)
class DerivationResult:
    """Output of a derivation: all signatures, and what decides whether they hold for a call.

    Args:
        signatures: all of them, that with every tensor B first.
        linear_signatures: signatures that hold by linearity, and only if the call keeps sums.
        joined_signatures: signatures whose form joins the ranks' results.
        never_empty_dims: (operand, dim) of each dim of which no rank's part may be empty.
        fetched_dims: dims of the first operand of which a rank fetches parts from its neighbours.
        unsplit_dims: dims of the first operand that the rule's letters do not split.
    """

    signatures: tuple[Signature, ...]
    linear_signatures: frozenset[Signature]
    joined_signatures: frozenset[Signature]
    never_empty_dims: frozenset[tuple[int, int]]
    fetched_dims: tuple[int, ...]
    unsplit_dims: tuple[int, ...]


def name_input_dims(rule: Rule, inputs: DerivationInput) -> tuple[DimNames, list[int]]:
    """Return (dim names of operands and outputs, indices of the tensors in ``inputs``).

    Operands that are numbers have no names and are left out. ``letters.py`` describes the names.
    """
    tensors = [i for i, shape in enumerate(inputs.shapes) if not isinstance(shape, str)]
    patterns: list[Pattern] = [rule.operands[inputs.rule_positions[i]][2] for i in tensors]
    ndims = [len(inputs.shapes[i]) for i in tensors]
    return name_dims(rule, patterns, ndims, inputs.along, inputs.keepdim), tensors


def sizes_of(operands: Sequence[tuple[Names, Shape]]) -> dict[str, int]:
    """Return the logical size of each dim name, from the (names, shape) of operands.

    An operand may have size 1 where others have more, because it broadcasts: the larger one counts.
    """
    sizes: dict[str, int] = {}
    for names, shape in operands:
        for name, n in zip(names, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = n
    return sizes
