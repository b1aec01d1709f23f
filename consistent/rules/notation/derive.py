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
from .given import (
    MEAN,
    UNSAFE_NUMBER,
    DerivationInput,
    DerivationResult,
    Shape,
    name_input_dims,
    sizes_of,
)
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
        index: its position among the operands of the call.
        whole_numbers: whether its dtype is an integer or bool dtype.
    """

    term: int
    head: str
    names: Names
    shape: Shape
    index: int
    whole_numbers: bool


@lru_cache(maxsize=65536)
def derive(rule: Rule, inputs: DerivationInput) -> DerivationResult:
    """Return all SBP signatures of ``rule``, and which of them hold only under further conditions.

    The conditions are checked for each call (``holds.py``), so that equal inputs share the result.

    Raises:
        DoesNotFit: an operand has another number of dims than its pattern.
    """
    return _Derivation(rule, inputs).result()


class _Derivation:
    """One run of ``derive``: the operands with named dims, and a method per kind of signature."""

    def __init__(self, rule: Rule, inputs: DerivationInput) -> None:
        self.rule, self.input = rule, inputs
        dim_names, tensors = name_input_dims(rule, inputs)
        self.operands = [
            _Operand(
                self._term_of(i),
                rule.operands[inputs.rule_positions[i]][1],
                names,
                inputs.shapes[i],  # type: ignore[arg-type]
                inputs.operand_indices[i], inputs.whole_numbers[i],
            )
            for i, names in zip(tensors, dim_names.ins, strict=True)
        ]  # fmt: skip
        self.outs = self._output_names(dim_names.outs)
        self.sizes = sizes_of([(x.names, x.shape) for x in self.operands])
        self.count = len(self.operands)
        self._operands_by_term: dict[int, list[int]] = {}  # the operands of each term
        for i, x in enumerate(self.operands):
            self._operands_by_term.setdefault(x.term, []).append(i)
        shapes = enumerate(inputs.shapes)
        self._unsafe_number_terms = {
            self._term_of(i) for i, shape in shapes if shape == UNSAFE_NUMBER
        }

    def _term_of(self, i: int) -> int:
        """Return the index of the rule's term that the ``i``-th operand is in.

        Operands of a repeated pattern (``...*``) are added to each other: each is a term of its
        own.
        """
        term, head, pattern = self.rule.operands[self.input.rule_positions[i]]
        return len(self.rule.terms) + i if pattern.repeated and not head else term

    def _output_names(self, outs: tuple[Names, ...]) -> list[Names]:
        """Return the dim names of each output; a repeated last pattern serves all further outputs.

        A loss that is reduced to one number has no dims.
        """
        names_by_output = [
            () if out.head == "loss" and self.input.reduction else names
            for out, names in zip(self.rule.outs, outs, strict=True)
        ]
        missing_count = len(self.input.requested_outs) - len(names_by_output)
        if self.rule.outs[-1].patterns[0].repeated:
            names_by_output += [names_by_output[-1]] * missing_count
        return names_by_output

    def result(self) -> DerivationResult:
        """Return all signatures, with those among them that need further conditions."""
        linear_signatures = list(self._linear_signatures())
        joining_forms = {form.name for form in self.rule.forms if form.joined}
        joined_signatures: list[Signature] = []
        signatures = [self._signature({}, self._output_sbps(B)), *self._extreme_signatures()]
        for name in dict.fromkeys(itertools.chain(*(x.names for x in self.operands))):
            split_signatures = self._split_signatures(name)
            signatures += split_signatures
            joined_signatures += [s for s in split_signatures if s.form in joining_forms]
        joined_signatures += [s for s in linear_signatures if s.form in joining_forms]
        linear_signatures += self._partial_shape_variants(linear_signatures)
        signatures = [*signatures, *self._partial_shape_variants(signatures), *linear_signatures]
        return DerivationResult(
            # Not a set: ranks need one order, as the earlier of two equally cheap signatures wins.
            tuple(dict.fromkeys(signatures)), frozenset(linear_signatures),
            frozenset(joined_signatures), self._never_empty_dims(),
            self._first_operand_dims(self.rule.fetched_letters),
            self._first_operand_dims(self.rule.unsplit_letters),
        )  # fmt: skip

    # -- signatures --------------------------------------------------------------------------------

    def _signature(
        self, ins: dict[int, Sbp], outs: Sequence[Sbp], form: str | None = None
    ) -> Signature:
        """Return an SBP signature with the SBPs ``ins``; other operands are B.

        ``ins`` is by index in ``self.operands``. ``form`` is the form that serves this signature,
        if the rule does not name one for all signatures.
        """
        by_index = {self.operands[i].index: entry for i, entry in ins.items()}
        entries = tuple(by_index.get(place, B) for place in range(self.count))
        default_form = next((f.name for f in self.rule.forms if not f.letters), None)
        return Signature(entries, tuple(outs), form or default_form)

    def _output_sbps(self, entry: Sbp) -> list[Sbp]:
        """Return ``entry`` for each output, but B for outputs that depend only on shapes.

        Those are the outputs inside ``shape( )``.
        """
        heads = [out.head for out in self.rule.outs]
        heads += [heads[-1]] * (len(self.outs) - len(heads))
        return [B if head == "shape" else entry for head in heads]

    def _split_signatures(self, name: str) -> list[Signature]:
        """Return the SBP signatures in which the dim ``name`` is split, wherever operands have it.

        For "k" of "mk, kn -> mn": ``S(1), S(0) -> P``. There are none for a dim that the rule marks
        as whole or that an operand has twice.
        """
        if letter_of(name) in self.rule.unsplit_letters or self._sizes_differ(name):
            return []
        if any(x.names.count(name) > 1 for x in self.operands):
            return []
        # Views are left to ``moved_split_signatures``, by strides.
        if any(out.head == "view" for out in self.rule.outs):
            return []
        splits = {
            i: entry
            for i, x in enumerate(self.operands)
            if (entry := self._split_of_operand(x, name))
        }
        holders = [i for i, x in enumerate(self.operands) if name in x.names]
        forms = [f for f in self.rule.forms if letter_of(name) in f.letters]
        if not splits or (forms and len(splits) < len(holders)):
            return []
        if any(name in names for names in self.outs):
            return self._kept_dim_signatures(name, splits, forms)
        return self._reduced_dim_signatures(splits, forms)

    def _sizes_differ(self, name: str) -> bool:
        """Return whether operands differ in the size of dim ``name``, which then is not split.

        Only rules with the flag "sizes may differ" allow it, as that of gather.
        """
        if "sizes may differ" not in self.rule.flags:
            return False
        sizes = {
            x.shape[x.names.index(name)] for x in self.operands if x.names.count(name) == 1
        }  # fmt: skip
        return len(sizes) > 1

    def _split_of_operand(self, x: _Operand, name: str) -> Sbp | None:
        """Return the split of operand ``x`` along the dim ``name``, or None.

        None if it lacks the dim, or broadcasts along it.
        """
        if name not in x.names:
            return None
        dim = x.names.index(name)
        # A dim of size 1 that broadcasts counts as absent.
        return None if x.shape[dim] == 1 != self.sizes[name] else S(dim)

    def _kept_dim_signatures(
        self, name: str, splits: dict[int, Sbp], forms: Sequence[FormClause]
    ) -> list[Signature]:
        """Return the SBP signatures that split a dim ``name`` that the outputs have, too.

        The outputs are split along it. ``splits`` has the splits of the operands, and ``forms`` the
        forms that the rule names for the dim.
        """
        forms = [form for form in forms if not form.joined]  # nothing to join
        outs: list[Sbp] = [
            S(names.index(name)) if name in names and is_requested else B
            for names, is_requested in zip(self.outs, self.input.requested_outs, strict=True)
        ]
        if not forms:
            lacks_dim = any(
                name not in names and is_requested
                for names, is_requested in zip(self.outs, self.input.requested_outs, strict=True)
            )
            return [] if lacks_dim else [self._signature(splits, outs)]
        return [self._signature(splits, outs, form.name) for form in forms]

    def _reduced_dim_signatures(
        self, splits: dict[int, Sbp], forms: Sequence[FormClause]
    ) -> list[Signature]:
        """Return the SBP signatures for a split dim that no output has.

        The outputs are P, or P(max) inside ``max( )``, or B if a form joins the ranks' results.
        ``splits`` has the splits of the operands, and ``forms`` the forms that the rule names for
        the dim.
        """
        heads = {self.operands[i].head for i in splits}
        if heads == {"shape"}:  # no value of it reaches the output
            return [self._signature(splits, self._output_sbps(B))]
        joins = [form for form in forms if form.joined]
        signatures = [self._signature(splits, self._output_sbps(B), form.name) for form in joins]
        form_name = next((form.name for form in forms if not form.joined), None)
        if self.input.reduction == MEAN and not joins:
            form_name = "mean_loss"
        if joins and form_name is None and not heads & {"max", "min"}:
            return signatures
        if heads & {"max", "min"}:
            kind = partial_max if "max" in heads else partial_min
            return [self._signature(splits, self._output_sbps(kind), form_name), *signatures]
        return [*self._summed_dim_signatures(splits, form_name), *signatures]

    def _summed_dim_signatures(self, splits: dict[int, Sbp], form: str | None) -> list[Signature]:
        """Return the SBP signatures that split a dim that is summed over, so that the output is P.

        ``splits`` has the splits of the operands that have the dim. If the rule adds other terms,
        one operand of each is P, so that the terms can be added: ``P, S(1), S(0) -> P`` of "mn +
        mk, kn -> mn".
        """
        in_term = {self.operands[i].term for i in splits}
        other_terms = self._term_indices() - in_term
        if len(in_term) != 1 or any(not self._linear_operands(term) for term in other_terms):
            return []
        signatures = []
        for partials in itertools.product(
            *(self._linear_operands(term) for term in sorted(other_terms))
        ):
            signatures.append(
                self._signature(
                    {**splits, **dict.fromkeys(partials, P)}, self._output_sbps(P), form
                )
            )
        return signatures

    def _linear_signatures(self) -> Iterator[Signature]:
        """Yield the SBP signatures by linearity: one operand of each term is P, so the output is P.

        ``P, B -> P`` and ``B, P -> P`` of "mk, kn -> mn". If the rule has a form that joins the
        ranks' results, the output is B instead.
        """
        by_term = [self._linear_operands(term) for term in sorted(self._term_indices())]
        joins = next((form.name for form in self.rule.forms if form.joined), None)
        for partials in itertools.product(*by_term):
            if partials:
                yield self._signature(
                    dict.fromkeys(partials, P), self._output_sbps(B if joins else P), joins
                )

    def _extreme_signatures(self) -> list[Signature]:
        """Return the SBP signatures in which P(max) and P(min) pass ``max( )`` and ``min( )``.

        Of "max(..., ...) -> ...": all operands are P(max), or one is P(max) or P(min) and the other
        B.
        """
        heads = {x.head for x in self.operands} & {"max", "min"}
        if not heads:
            return []
        kind = partial_max if "max" in heads else partial_min
        signatures = [
            self._signature(dict.fromkeys(range(self.count), kind), self._output_sbps(kind))
        ]
        if self.count > 1:
            for i, one_kind in itertools.product(range(self.count), EXTREMES):
                signatures.append(self._signature({i: one_kind}, self._output_sbps(one_kind)))
        return signatures

    def _partial_shape_variants(self, signatures: Sequence[Signature]) -> list[Signature]:
        """Return variants of ``signatures`` in which an operand inside ``shape( )`` is partial.

        It may be P, P(max) or P(min), as only its shape is read. Signatures with splits get no
        variants.
        """
        places = [x.index for x in self.operands if x.head == "shape"]
        variants = []
        for signature, place, kind in itertools.product(signatures, places, (P, *EXTREMES)):
            if signature.ins[place] is B and not any(e.is_split for e in signature.ins):
                ins = (*signature.ins[:place], kind, *signature.ins[place + 1 :])
                variants.append(Signature(ins, signature.outs, signature.form))
        return variants

    # -- which operands may be P -------------------------------------------------------------------

    def _term_indices(self) -> set[int]:
        """Return the indices of the terms that the call has, including terms that are a number."""
        return {self._term_of(i) for i in range(len(self.input.rule_positions))}

    def _linear_operands(self, term: int) -> list[int]:
        """Return the operands of a term that may be P, because the term is linear in them.

        An operand inside a function may not be P. For any other, the rest of the term must hold
        finite numbers, since an addend of 0 times infinity is NaN, or the product must be summed.
        """
        if term in self._unsafe_number_terms:  # an infinite factor, or division by 0
            return []
        members = self._operands_by_term.get(term, [])
        candidates = [i for i in members if not self.operands[i].head]
        return [
            i
            for i in candidates
            if all(self._may_be_partial_beside(i, j) for j in members if j != i)
        ]

    def _may_be_partial_beside(self, i: int, beside: int) -> bool:
        """Return whether operand ``i`` may be P although it is multiplied by operand ``beside``.

        It may if ``beside`` holds only finite numbers, as integers do, or if a dim of the product
        is summed: there an infinite number makes the whole sum infinite or NaN in any case.
        """
        x, factor = self.operands[i], self.operands[beside]
        if factor.head == "shape":
            return True
        if factor.whole_numbers and factor.head != "1/":
            return True
        out_names = set(itertools.chain(*self.outs))
        return any(name not in out_names for name in (*x.names, *factor.names))

    # -- dims --------------------------------------------------------------------------------------

    def _never_empty_dims(self) -> frozenset[tuple[int, int]]:
        """Return (operand, dim) of the dims that the rule marks as never empty on a rank ("n!")."""
        return frozenset(
            (x.index, d)
            for x in self.operands
            for d, name in enumerate(x.names)
            if letter_of(name) in self.rule.never_empty_letters
        )

    def _first_operand_dims(self, letters: frozenset[str]) -> tuple[int, ...]:
        """Return the dims of the first operand that come from one of ``letters``."""
        names = self.operands[0].names if self.operands else ()
        return tuple(d for d, name in enumerate(names) if letter_of(name) in letters)
