"""Application of rules to a call: matching operands to patterns, and selecting signatures.

Dtypes, sizes and numbers of the call select among the derived signatures. A row may have several
rules, for other numbers of dims or other arguments: the first that fits is taken.
"""

from __future__ import annotations

import cmath
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from ..halo.halo import with_halo
from ..signature import Call, DoesNotFit, Operand, Signature, as_dims
from .derive import derive
from .given import HALVES, MEAN, NONE, NUMBER, UNSAFE_NUMBER, DerivationInput, name_input_dims
from .holds import (
    extreme_variants,
    has_no_empty_part,
    is_integral,
    keeps_order,
    monotone_signatures,
    passes_partial,
    split_result_variants,
    with_sent_bytes,
)
from .rule import REST, Condition, Pattern, Rule
from .strides import moved_split_signatures

Along = str | Callable[[Call], Sequence[int] | None]


def signatures_of(
    rules: Sequence[Rule], call: Call, parts: int, along: Along = "dim"
) -> list[Signature]:
    """Return every SBP signature that ``rules`` give ``call`` on an axis of ``parts`` ranks.

    The first of ``rules`` that applies is taken. The signature in which every tensor is B comes
    first.

    Args:
        rules: the rules of the op's row.
        call: the call, with its operands and outputs.
        parts: the number of ranks on the axis, for the bytes that forms send.
        along: the argument that names the dims of capital letters, or a function of the call.

    Raises:
        DoesNotFit: none of the rules is for this call.
    """
    rule, derivation_input = fit(rules, call, along)
    derived = derive(rule, derivation_input)
    dropped = (
        derived.linear_signatures
        if derived.linear_signatures and not passes_partial(rule, call)
        else ()
    )
    allowed = [s for s in derived.signatures if s not in dropped and keeps_order(s, call)]
    allowed = [with_sent_bytes(s, rule, derived, call, parts) for s in allowed]
    allowed = [s for s in allowed if has_no_empty_part(s, derived, call)]
    # In the order of signatures, as the order of a set differs from rank to rank.
    joined = [s for s in derived.signatures if s in derived.joined_signatures]
    joined = [with_sent_bytes(s, rule, derived, call, parts) for s in joined]
    allowed += [v for s in joined for v in split_result_variants(s, call, parts)]
    allowed += monotone_signatures(rule, call)
    if any(out.head == "view" for out in rule.outs):
        allowed += moved_split_signatures(call, derived.unsplit_dims)
    if "moves" in rule.flags:
        allowed += extreme_variants(allowed)
    return (
        allowed + with_halo(call, parts, derived.fetched_dims) if derived.fetched_dims else allowed
    )


# -- which rule, which operand ---------------------------------------------------------------------


def fit(rules: Sequence[Rule], call: Call, along: Along) -> tuple[Rule, DerivationInput]:
    """Return the first of ``rules`` that applies to ``call``, and the input of its derivation.

    A rule applies if its conditions ("if left") hold, and its patterns have the operands' numbers
    of dims. ``along`` is as for ``signatures_of``.

    Raises:
        DoesNotFit: none of them does.
    """
    why = ""
    for rule in rules:
        if not all(_condition_holds(condition, call) for condition in rule.conditions):
            continue
        try:
            derivation_input = _derivation_input(rule, call, along)
            name_input_dims(rule, derivation_input)
        except DoesNotFit as error:
            why = str(error)
            continue
        return rule, derivation_input
    raise DoesNotFit(f"{call.name}: {why or 'its arguments'}")


def _condition_holds(condition: Condition, call: Call) -> bool:
    """Return whether a condition of a rule holds for ``call``: "if left", "unless reduce is prod".

    "if half" asks whether the result has a half-precision dtype.
    """
    if condition.argument == "half":
        holds = any(out.dtype in HALVES for out in call.outs[:1])
    elif condition.value:
        holds = str(call.get(condition.argument)) == condition.value
    else:
        value = call.get(condition.argument)
        holds = isinstance(value, Operand) or bool(value)
    return holds is not condition.negated


def _derivation_input(rule: Rule, call: Call, along: Along) -> DerivationInput:
    """Return what the derivation of ``rule`` needs to know of ``call``.

    Raises:
        DoesNotFit: operands or outputs of the call do not match the rule's patterns.
    """
    outs = call.outs
    pairs = list(_match_operands(rule, call))
    if sum(isinstance(x, Operand) for _, x in pairs) != len(call.operands):
        raise DoesNotFit("an operand that the rule does not name")
    exact = "sizes may differ" in rule.flags
    repeated = rule.outs[-1].patterns[0].repeated
    if len(outs) < len(rule.outs) or (len(outs) > len(rule.outs) and not repeated):
        raise DoesNotFit(f"{len(outs)} outputs, and the rule has {len(rule.outs)}")
    # Torch returns an empty tensor for an output that the call does not request.
    may_lack = any(REST in p.names for out in rule.outs for p in out.patterns)
    may_lack = may_lack and all(x.shape.numel() for x in call.operands)
    return DerivationInput(
        tuple(place for place, _ in pairs),
        tuple(x.index if isinstance(x, Operand) else -1 for _, x in pairs),
        tuple(_shape_pattern(x, exact, rule.operands[place][1]) for place, x in pairs),
        tuple(isinstance(x, Operand) and is_integral(x.spec.dtype) for _, x in pairs),
        tuple(not may_lack or tuple(out.shape) != (0,) for out in outs),
        _capital_dims(rule, call, along),
        "keepdim" in call.params and bool(call.get("keepdim")),
        reduction_of(call) if any(out.head == "loss" for out in rule.outs) else NONE,
    )


def _match_operands(rule: Rule, call: Call) -> Iterator[tuple[int, Any]]:
    """Yield (position in the rule, operand or number) for the operands of ``call``.

    Operands that no other pattern takes belong to the repeated pattern, if there is one.
    """
    position, unmatched = 0, list(call.operands)
    for place, (_, _, pattern) in enumerate(rule.operands):
        if pattern.repeated:
            continue
        value = _argument_of_pattern(pattern, position, call)
        position += not pattern.argument
        if value is None:
            continue
        if isinstance(value, Operand):
            if value in unmatched:
                unmatched.remove(value)
        elif not isinstance(value, int | float | complex):
            raise DoesNotFit(f"an operand is given as {type(value).__name__}")
        yield place, value
    for place, (_, _, pattern) in enumerate(rule.operands):
        if pattern.repeated:
            yield from ((place, operand) for operand in unmatched)


def _argument_of_pattern(pattern: Pattern, position: int, call: Call) -> Any:
    """Return the call's argument for a pattern of the rule, or None if it is left out.

    It is found by the name in the pattern (``bias:c``), or else by ``position`` among the
    arguments.
    """
    if pattern.argument:
        return call.get(pattern.argument)
    if position < len(call.params):
        return call.get(call.params[position])
    return call.args[position] if position < len(call.args) else None


def _shape_pattern(x: Any, exact: bool, head: str) -> tuple[int, ...] | str:
    """Return as much of an operand's sizes as a rule depends on: (1, 8, 3) -> (1, 2, 2).

    Args:
        x: the operand, or a number. The result for a number is NUMBER, or UNSAFE_NUMBER if P may
            not be multiplied by it.
        exact: return the sizes themselves, for rules whose operands may differ in size.
        head: the function around the operand in the rule.
    """
    if isinstance(x, Operand):
        return tuple(x.shape) if exact else tuple(1 if n == 1 else 2 for n in x.shape)
    return UNSAFE_NUMBER if not cmath.isfinite(x) or (head == "1/" and x == 0) else NUMBER


def _capital_dims(rule: Rule, call: Call, along: Along) -> tuple[int, ...] | None:
    """Return the dims that the capital letters of ``rule`` stand for; None for all dims."""
    if not rule.has_capitals:
        return ()
    if isinstance(along, str):
        return as_dims(call.get(along))
    dims = along(call)
    return None if dims is None else tuple(dims)


def reduction_of(call: Call) -> int:
    """Return the reduction of a loss: NONE, MEAN or SUM, numbered as in torch.

    If the call does not say, it is inferred from the shapes: a result with dims has NONE.

    Raises:
        DoesNotFit: the argument is left out, and the default, which differs between torch's
            bindings, cannot be inferred.
    """
    reduction = call.get("reduction")
    if reduction is not None:
        return reduction
    # The default is inferred from the shape of the result.
    if call.outs[0].ndim:
        return NONE
    if call.operands[0].ndim > 1:
        return MEAN
    raise DoesNotFit(f"{call.name}: a default reduction to one number or of one number")
