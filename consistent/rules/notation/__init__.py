"""Rules as mathematics: ``"mk, kn -> mn"`` gives every signature of the op.

docs/adding_an_op.md has the grammar. ``rule.py`` defines a rule, ``parse.py`` reads one from text,
``letters.py`` names the dims of given operands, ``derive.py`` makes signatures from the names,
``fit.py`` and ``holds.py`` select the signatures that hold for one call, ``sends.py`` counts bytes
of forms.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..signature import Call, DoesNotFit, Signature
from .derive import derive
from .fit import Along, reduction_of, signatures_of
from .given import HALVES, MEAN, NONE, SUM, DerivationInput
from .holds import extreme_variants, split_result_variants
from .parse import parse
from .rule import Rule
from .sends import digit_counts_bytes, join_bytes, result_bytes
from .strides import kept_dim_positions, moved_split_signatures, view_signatures

__all__ = [
    "HALVES",
    "MEAN",
    "NONE",
    "SUM",
    "Along",
    "Rule",
    "digit_counts_bytes",
    "extreme_variants",
    "join_bytes",
    "kept_dim_positions",
    "moved_split_signatures",
    "parse",
    "reduction_of",
    "result_bytes",
    "signatures",
    "signatures_of",
    "signatures_of_text",
    "split_result_variants",
    "view_signatures",
]


def signatures_of_text(text: str, call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of ``call`` by the rule ``text``, which has its operands in order.

    It is for rules that depend on the call, such as that of einsum, on an axis of ``parts`` ranks.
    Other rules are in the table and parsed once.
    """
    plain = Call(call.name, call.operands, {}, call.operands, call.outs)
    return signatures_of([parse(text)], plain, parts)


def signatures(text: str, shapes: Sequence[Sequence[int]]) -> tuple[Signature, ...]:
    """Return the SBP signatures of the rule ``text`` for floating-point operands of ``shapes``.

    ``signatures("mk, kn -> mn", [(4, 3), (3, 5)])`` are the 6 of ``mm``: ``B, B -> B``, ``S(0), B
    -> S(0)``, ``S(1), S(0) -> P``, ...

    Raises:
        DoesNotFit: there are too many shapes, or one has another number of dims than the rule says.
    """
    rule = parse(text)
    count = len(shapes)
    if count > len(rule.operands):
        raise DoesNotFit(
            f'rule "{rule}" names {len(rule.operands)} operands, and {count} are given'
        )
    pattern = tuple(tuple(1 if n == 1 else 2 for n in shape) for shape in shapes)
    derivation_input = DerivationInput(
        tuple(range(count)), tuple(range(count)), pattern, (False,) * count,
        (True,) * len(rule.outs),
    )  # fmt: skip
    return derive(rule, derivation_input).signatures
