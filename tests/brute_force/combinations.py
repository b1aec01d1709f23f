"""Which signatures of several axes are proven together."""

from __future__ import annotations

import itertools
import random
from typing import Any

from consistent.rules import DoesNotFit, Signature
from consistent.spec import has_one_partial_kind
from tests.brute_force.expected import Expected
from tests.ranks import ALL

Chosen = tuple[Signature, ...]
# Combinations over several axes that are proven where there are more than show each signature of
# each axis, and each pair of kinds of signatures.
MOST = 200 if ALL else 0


def combinations(op: Expected, seen: set[Any] | None = None) -> list[Chosen]:
    """Signatures for all axes together: at most one form among them, as the choice in dispatch
    has it. Kinds that are in ``seen`` need not be shown together, and those shown are put there."""
    seen = set() if seen is None else seen
    try:
        by_axis = [op.signatures(axis) for axis in range(len(op.shape))]
    except DoesNotFit as error:
        raise AssertionError(f"{op}: {error}") from error
    made = [
        chosen
        for chosen in itertools.product(*by_axis)
        if len({s.form for s in chosen if s.form is not None}) <= 1
        and all(
            has_one_partial_kind(entries)
            for sides in ([s.ins for s in chosen], [s.outs for s in chosen])
            for entries in zip(*sides, strict=True)
        )
    ]
    if len(op.shape) == 1:
        return made
    by_form = [chosen for chosen in made if any(s.form for s in chosen)]
    others = [chosen for chosen in made if not any(s.form for s in chosen)]
    return _drawn(others, seen) + _drawn(by_form, seen)


def _drawn(made: list[Chosen], kinds: set[Any]) -> list[Chosen]:
    """Each signature of each axis once, and each pair of kinds that is not in ``kinds``; more of
    them up to MOST."""
    drawn = random.Random(0).sample([(chosen, _shown(chosen)) for chosen in made], len(made))
    seen = set(kinds)
    first, rest = [], drawn
    for unseen in range(len(made[0]) + 1 if made else 0, 0, -1):  # those that show most come first
        others = []
        for chosen, shows in rest:
            if len(shows - seen) >= unseen:
                first.append(chosen)
                seen |= shows
            else:
                others.append((chosen, shows))
        rest = others
    kinds |= {_kinds(chosen) for chosen in first}
    return first + [chosen for chosen, _ in rest[: max(0, MOST - len(first))]]


def _shown(chosen: Chosen) -> set[Any]:
    """What a combination is proof of: its signatures on their axes, and their kinds together.
    Where a form runs, those without one are not counted: others show them."""
    by_form = any(s.form for s in chosen)
    return {_kinds(chosen)} | {(k, s) for k, s in enumerate(chosen) if s.form or not by_form}


def _kinds(chosen: Chosen) -> tuple[tuple[str, ...], int]:
    return tuple(map(_kind, chosen)), len(set(chosen))


def _kind(signature: Signature) -> str:
    """The form of a signature, or else what the ranks of an axis hold."""
    entries = (*signature.ins, *signature.outs)
    kinds = ("is_extreme", "is_partial", "is_split", "is_broadcast")
    return signature.form or next(k for k in kinds if any(getattr(e, k) for e in entries))
