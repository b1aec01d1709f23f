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

    It has the term of the rule it is in, the function around it (``head``), the names and sizes of
    its dims, and its index among the operands of the call (``place``).
    """

    term: int
    head: str
    names: Names
    shape: Shape
    place: int
    whole_numbers: bool


@lru_cache(maxsize=65536)
def derive(rule: Rule, given: Given) -> Derived:
    """Return all signatures of ``rule``, and which of them hold only under further conditions.

    Raises:
        DoesNotFit: an operand has another number of dims than its pattern.
    """
    return _Derivation(rule, given).derived()


class _Derivation:
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

        Each operand of a repeated pattern is a term of its own.
        """
        term, head, pattern = self.rule.operands[self.given.places[i]]
        return len(self.rule.terms) + i if pattern.repeated and not head else term

    def _outputs(self, outs: tuple[Names, ...]) -> list[Names]:
        """Return the dim names of each output.

        A repeated last pattern serves all further outputs of the call.
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
        """Return a signature. ``ins`` is by index in ``self.operands``; other operands are B."""
        by_place = {self.operands[i].place: entry for i, entry in ins.items()}
        entries = tuple(by_place.get(place, B) for place in range(self.count))
        everywhere = next((f.name for f in self.rule.forms if not f.letters), None)
        return Signature(entries, tuple(outs), form or everywhere)

    def _all(self, entry: Sbp) -> list[Sbp]:
        """Return ``entry`` for each output, but B for outputs without values of the operands."""
        heads = [out.head for out in self.rule.outs]
        heads += [heads[-1]] * (len(self.outs) - len(heads))
        return [B if head == "shape" else entry for head in heads]

    def _split(self, name: str) -> list[Signature]:
        """Return the signatures of a call in which the dim ``name`` is split."""
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
        """Return whether operands differ in the size of dim ``name``, which then stays whole.

        Only rules with the flag "sizes may differ" allow it.
        """
        if "sizes may differ" not in self.rule.flags:
            return False
        sizes = {
            x.shape[x.names.index(name)] for x in self.operands if x.names.count(name) == 1
        }  # fmt: skip
        return len(sizes) > 1

    def _cut(self, x: _Operand, name: str) -> Sbp | None:
        if name not in x.names:
            return None
        dim = x.names.index(name)
        # A dim of size 1 that broadcasts counts as absent.
        return None if x.shape[dim] == 1 != self.sizes[name] else S(dim)

    def _kept(self, name: str, at: dict[int, Sbp], forms: Sequence[FormClause]) -> list[Signature]:
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
        """Return signatures that split a letter that is summed away, so that the output is P.

        ``at`` has the splits of the operands with the letter. An operand of each other term is P,
        so that the terms add up.
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
        """Yield the signatures with one P in each term."""
        by_term = [self._addends(term) for term in sorted(self._terms())]
        joins = next((form.name for form in self.rule.forms if form.joined), None)
        for pick in itertools.product(*by_term):
            if pick:
                yield self._make(dict.fromkeys(pick, P), self._all(B if joins else P), joins)

    def _extremes(self) -> list[Signature]:
        """Return the signatures by which P(max) and P(min) pass through ``max( )`` and ``min( )``.

        All operands may have the extreme that the function takes, or one operand may have either.
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

        Only its shape is read, so it may be partial in any way.
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
        """Return the terms of the rule that the call has, including terms that are a number."""
        return {self._term_of(i) for i in range(len(self.given.places))}

    def _addends(self, term: int) -> list[int]:
        """Return the operands of ``term`` that may be P because the term is linear in them.

        The other operands of the term must give 0 when multiplied by 0.
        """
        if term in self._of_numbers:  # an infinite factor, or division by 0
            return []
        inside = self._by_term.get(term, [])
        found = [i for i in inside if not self.operands[i].head]
        return [i for i in found if all(self._is_finite(i, j) for j in inside if j != i)]

    def _is_finite(self, i: int, beside: int) -> bool:
        """Return whether addends of operand ``i`` may be multiplied by operand ``beside``.

        They may if it holds only finite numbers, or if the product is summed: there an infinite
        number spoils the whole sum anyway.
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
        return frozenset(
            (x.place, d)
            for x in self.operands
            for d, name in enumerate(x.names)
            if letter_of(name) in self.rule.filled
        )

    def _dims_of_first(self, letters: frozenset[str]) -> tuple[int, ...]:
        names = self.operands[0].names if self.operands else ()
        return tuple(d for d, name in enumerate(names) if letter_of(name) in letters)
