"""Derivation of every signature that a rule gives for operands of some shapes, on one axis.

* Every tensor is B.
* A letter that occurs on the right: S where it occurs, B elsewhere, output S.
* A letter missing on the right is summed away: S where it occurs in its term, B for the rest of
  that term, P for the other terms, output P. Inside ``max( )`` the output is P(max).
* Linearity: one P in each term, B elsewhere, output P.

A rule depends on a size only by whether it is 1, so one derivation serves all other sizes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache

from ...spec import EXTREMES, B, P, S, Sbp
from ...spec.sbp import partial_max, partial_min
from ..signature import Signature
from .given import MEAN, UNSAFE_NUMBER, Derived, Given, Shape, sizes_of, spell_given
from .letters import Names, letter_of
from .rule import FormClause, Rule


@dataclass(frozen=True, slots=True)
class _Operand:
    """Tensor operand of a call, matched with its pattern in the rule.

    Args:
        term: index of the term of the rule that it is in.
        head: the function around it in the rule, such as "f" or "max"; "" without one.
        names: names of its dims.
        shape: its sizes.
        place: its index among the operands of the call.
        whole_numbers: whether its dtype is an integer or bool dtype.
    """

    term: int
    head: str
    names: Names
    shape: Shape
    place: int
    whole_numbers: bool


@lru_cache(maxsize=65536)
def derive(rule: Rule, given: Given) -> Derived:
    """Return all SBP signatures of ``rule``, and which of them hold only under further conditions.

    The conditions are checked for each call (``holds.py``), so that equal ``given`` share the
    result.

    Raises:
        DoesNotFit: an operand has another number of dims than its pattern.
    """
    return _Derivation(rule, given).derived()


class _Derivation:
    """One run of ``derive``: the operands with named dims, and a method per kind of signature."""

    def __init__(self, rule: Rule, given: Given) -> None:
        self.rule, self.given = rule, given
        spelled, tensors = spell_given(rule, given)
        self.operands = [
            _Operand(
                self._term_of(i), rule.operands[given.places[i]][1], names,
                given.shapes[i],  # type: ignore[arg-type]
                given.order[i], given.whole_numbers[i],
            )
            for i, names in zip(tensors, spelled.ins, strict=True)
        ]  # fmt: skip
        self.outs = self._outputs(spelled.outs)
        self.sizes = sizes_of([(x.names, x.shape) for x in self.operands])
        self.count = len(self.operands)
        self._by_term: dict[int, list[int]] = {}  # the operands of each term
        for i, x in enumerate(self.operands):
            self._by_term.setdefault(x.term, []).append(i)
        shapes = enumerate(given.shapes)
        self._of_numbers = {self._term_of(i) for i, shape in shapes if shape == UNSAFE_NUMBER}

    def _term_of(self, i: int) -> int:
        """Return the index of the rule's term that the ``i``-th operand is in.

        Operands of a repeated pattern (``...*``) are added to each other: each is a term of its
        own.
        """
        term, head, pattern = self.rule.operands[self.given.places[i]]
        return len(self.rule.terms) + i if pattern.repeated and not head else term

    def _outputs(self, outs: tuple[Names, ...]) -> list[Names]:
        """Return the dim names of each output; a repeated last pattern serves all further outputs.

        A loss that is reduced to one number has no dims.
        """
        found = [
            () if out.head == "loss" and self.given.reduction else names
            for out, names in zip(self.rule.outs, outs, strict=True)
        ]
        more = len(self.given.asked) - len(found)
        if self.rule.outs[-1].patterns[0].repeated:
            found += [found[-1]] * more
        return found

    def derived(self) -> Derived:
        """Return all signatures, with those among them that need further conditions."""
        linear = list(self._linear())
        joining = {form.name for form in self.rule.forms if form.joined}
        joined: list[Signature] = []
        made = [self._make({}, self._all(B)), *self._extremes()]
        for name in dict.fromkeys(itertools.chain(*(x.names for x in self.operands))):
            split = self._split(name)
            made += split
            joined += [s for s in split if s.form in joining]
        joined += [s for s in linear if s.form in joining]
        linear += self._of_shapes(linear)
        made = [*made, *self._of_shapes(made), *linear]
        return Derived(
            # Not a set: ranks need one order, as the earlier of two equally cheap signatures wins.
            tuple(dict.fromkeys(made)), frozenset(linear), frozenset(joined), self._filled(),
            self._dims_of_first(self.rule.fetched), self._dims_of_first(self.rule.whole),
        )  # fmt: skip

    # -- signatures --------------------------------------------------------------------------------

    def _make(self, ins: dict[int, Sbp], outs: Sequence[Sbp], form: str | None = None) -> Signature:
        """Return an SBP signature with the SBPs ``ins``; other operands are B.

        ``ins`` is by index in ``self.operands``. ``form`` is the form that serves this signature,
        if the rule does not name one for all signatures.
        """
        by_place = {self.operands[i].place: entry for i, entry in ins.items()}
        entries = tuple(by_place.get(place, B) for place in range(self.count))
        everywhere = next((f.name for f in self.rule.forms if not f.letters), None)
        return Signature(entries, tuple(outs), form or everywhere)

    def _all(self, entry: Sbp) -> list[Sbp]:
        """Return ``entry`` for each output, but B for outputs that depend only on shapes.

        Those are the outputs inside ``shape( )``.
        """
        heads = [out.head for out in self.rule.outs]
        heads += [heads[-1]] * (len(self.outs) - len(heads))
        return [B if head == "shape" else entry for head in heads]

    def _split(self, name: str) -> list[Signature]:
        """Return the SBP signatures in which the dim ``name`` is split, wherever operands have it.

        For "k" of "mk, kn -> mn": ``S(1), S(0) -> P``. There are none for a dim that the rule marks
        as whole or that an operand has twice.
        """
        if letter_of(name) in self.rule.whole or self._differs(name):
            return []
        if any(x.names.count(name) > 1 for x in self.operands):
            return []
        if any(out.head == "view" for out in self.rule.outs):  # left to ``moved``, by strides
            return []
        at = {i: entry for i, x in enumerate(self.operands) if (entry := self._cut(x, name))}
        having = [i for i, x in enumerate(self.operands) if name in x.names]
        forms = [f for f in self.rule.forms if letter_of(name) in f.letters]
        if not at or (forms and len(at) < len(having)):
            return []
        if any(name in names for names in self.outs):
            return self._kept(name, at, forms)
        return self._reduced(at, forms)

    def _differs(self, name: str) -> bool:
        """Return whether operands differ in the size of dim ``name``, which then is not split.

        Only rules with the flag "sizes may differ" allow it, as that of gather.
        """
        if "sizes may differ" not in self.rule.flags:
            return False
        sizes = {
            x.shape[x.names.index(name)] for x in self.operands if x.names.count(name) == 1
        }  # fmt: skip
        return len(sizes) > 1

    def _cut(self, x: _Operand, name: str) -> Sbp | None:
        """Return the split of operand ``x`` along the dim ``name``, or None.

        None if it lacks the dim, or broadcasts along it.
        """
        if name not in x.names:
            return None
        dim = x.names.index(name)
        # A dim of size 1 that broadcasts counts as absent.
        return None if x.shape[dim] == 1 != self.sizes[name] else S(dim)

    def _kept(self, name: str, at: dict[int, Sbp], forms: Sequence[FormClause]) -> list[Signature]:
        """Return the SBP signatures that split a dim ``name`` that the outputs have, too.

        The outputs are split along it. ``at`` has the splits of the operands, and ``forms`` the
        forms that the rule names for the dim.
        """
        forms = [form for form in forms if not form.joined]  # nothing to join
        outs: list[Sbp] = [
            S(names.index(name)) if name in names and asked else B
            for names, asked in zip(self.outs, self.given.asked, strict=True)
        ]
        if not forms:
            missing = any(
                name not in names and asked
                for names, asked in zip(self.outs, self.given.asked, strict=True)
            )
            return [] if missing else [self._make(at, outs)]
        return [self._make(at, outs, form.name) for form in forms]

    def _reduced(self, at: dict[int, Sbp], forms: Sequence[FormClause]) -> list[Signature]:
        """Return the SBP signatures for a split dim that no output has.

        The outputs are P, or P(max) inside ``max( )``, or B if a form joins the ranks' results.
        ``at`` has the splits of the operands, and ``forms`` the forms that the rule names for the
        dim.
        """
        heads = {self.operands[i].head for i in at}
        if heads == {"shape"}:  # no value of it reaches the output
            return [self._make(at, self._all(B))]
        joins = [form for form in forms if form.joined]
        made = [self._make(at, self._all(B), form.name) for form in joins]
        by = next((form.name for form in forms if not form.joined), None)
        if self.given.reduction == MEAN and not joins:
            by = "mean_loss"
        if joins and by is None and not heads & {"max", "min"}:
            return made
        if heads & {"max", "min"}:
            kind = partial_max if "max" in heads else partial_min
            return [self._make(at, self._all(kind), by), *made]
        return [*self._summed(at, by), *made]

    def _summed(self, at: dict[int, Sbp], form: str | None) -> list[Signature]:
        """Return the SBP signatures that split a dim that is summed over, so that the output is P.

        ``at`` has the splits of the operands that have the dim. If the rule adds other terms, one
        operand of each is P, so that the terms can be added: ``P, S(1), S(0) -> P`` of "mn + mk, kn
        -> mn".
        """
        in_term = {self.operands[i].term for i in at}
        others = self._terms() - in_term
        if len(in_term) != 1 or any(not self._addends(term) for term in others):
            return []
        made = []
        for pick in itertools.product(*(self._addends(term) for term in sorted(others))):
            made.append(self._make({**at, **dict.fromkeys(pick, P)}, self._all(P), form))
        return made

    def _linear(self) -> Iterator[Signature]:
        """Yield the SBP signatures by linearity: one operand of each term is P, so the output is P.

        ``P, B -> P`` and ``B, P -> P`` of "mk, kn -> mn". If the rule has a form that joins the
        ranks' results, the output is B instead.
        """
        by_term = [self._addends(term) for term in sorted(self._terms())]
        joins = next((form.name for form in self.rule.forms if form.joined), None)
        for pick in itertools.product(*by_term):
            if pick:
                yield self._make(dict.fromkeys(pick, P), self._all(B if joins else P), joins)

    def _extremes(self) -> list[Signature]:
        """Return the SBP signatures in which P(max) and P(min) pass ``max( )`` and ``min( )``.

        Of "max(..., ...) -> ...": all operands are P(max), or one is P(max) or P(min) and the other
        B.
        """
        heads = {x.head for x in self.operands} & {"max", "min"}
        if not heads:
            return []
        kind = partial_max if "max" in heads else partial_min
        made = [self._make(dict.fromkeys(range(self.count), kind), self._all(kind))]
        if self.count > 1:
            for i, either in itertools.product(range(self.count), EXTREMES):
                made.append(self._make({i: either}, self._all(either)))
        return made

    def _of_shapes(self, made: Sequence[Signature]) -> list[Signature]:
        """Return variants of ``made`` in which an operand inside ``shape( )`` is partial.

        It may be P, P(max) or P(min), as only its shape is read. Signatures with splits get no
        variants.
        """
        places = [x.place for x in self.operands if x.head == "shape"]
        found = []
        for signature, place, kind in itertools.product(made, places, (P, *EXTREMES)):
            if signature.ins[place] is B and not any(e.is_split for e in signature.ins):
                ins = (*signature.ins[:place], kind, *signature.ins[place + 1 :])
                found.append(Signature(ins, signature.outs, signature.form))
        return found

    # -- which operands may be P -------------------------------------------------------------------

    def _terms(self) -> set[int]:
        """Return the indices of the terms that the call has, including terms that are a number."""
        return {self._term_of(i) for i in range(len(self.given.places))}

    def _addends(self, term: int) -> list[int]:
        """Return the operands of a term that may be P, because the term is linear in them.

        An operand inside a function may not be P. For any other, the rest of the term must hold
        finite numbers, since an addend of 0 times infinity is NaN, or the product must be summed.
        """
        if term in self._of_numbers:  # an infinite factor, or division by 0
            return []
        inside = self._by_term.get(term, [])
        found = [i for i in inside if not self.operands[i].head]
        return [i for i in found if all(self._is_finite(i, j) for j in inside if j != i)]

    def _is_finite(self, i: int, beside: int) -> bool:
        """Return whether operand ``i`` may be P although it is multiplied by operand ``beside``.

        It may if ``beside`` holds only finite numbers, as integers do, or if a dim of the product
        is summed: there an infinite number makes the whole sum infinite or NaN in any case.
        """
        x, other = self.operands[i], self.operands[beside]
        if other.head == "shape":
            return True
        if other.whole_numbers and other.head != "1/":
            return True
        kept = set(itertools.chain(*self.outs))
        return any(name not in kept for name in (*x.names, *other.names))

    # -- dims --------------------------------------------------------------------------------------

    def _filled(self) -> frozenset[tuple[int, int]]:
        """Return (operand, dim) of the dims that the rule marks as never empty on a rank ("n!")."""
        return frozenset(
            (x.place, d)
            for x in self.operands
            for d, name in enumerate(x.names)
            if letter_of(name) in self.rule.filled
        )

    def _dims_of_first(self, letters: frozenset[str]) -> tuple[int, ...]:
        """Return the dims of the first operand that come from one of ``letters``."""
        names = self.operands[0].names if self.operands else ()
        return tuple(d for d, name in enumerate(names) if letter_of(name) in letters)
