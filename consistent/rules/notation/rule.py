"""Rules as data: the parsed form of a text such as ``"mk, kn -> mn"``.

A rule prints as the text that parses to it: ``parse(str(rule)) is rule``.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import cached_property

# Functions that may enclose a factor, and an output.
HEADS = ("f", "1/", "max", "min", "shape")
OUT_HEADS = ("view", "loss", "shape")
FLAGS = ("falls", "moves", "rises", "rounds", "sizes may differ")
DOTS, REST = "...", "_"
CLOSING = {"[": "]", "<": ">"}


@dataclass(frozen=True, slots=True)
class Dim:
    """One dim of a pattern: a letter, ``...`` for all other dims, or ``_`` for any further dims.

    Args:
        name: the letter, "..." or "_".
        mark: "[" if every rank has all of the dim, as in "[c]"; "<" if a rank fetches what it needs
            of it from its neighbours, as in "<xy>"; else "".
        never_empty: no rank's part of the dim may be empty, as in "n!".
    """

    name: str
    mark: str = ""
    never_empty: bool = False

    def __str__(self) -> str:
        return self.name + "!" * self.never_empty

    @property
    def is_named_by_argument(self) -> bool:
        """True for a capital letter, which stands for the dims that an argument names."""
        return self.name.isupper()


@dataclass(frozen=True, slots=True)
class Pattern:
    """Dims of one operand or output, such as "mk", "bias:c" or "...*".

    Args:
        dims: the dims, in order.
        argument: name of the argument that the pattern is for, if the rule names one.
        repeated: any number of operands have this pattern.
    """

    dims: tuple[Dim, ...]
    argument: str = ""
    repeated: bool = False

    def __str__(self) -> str:
        text = f"{self.argument}:" if self.argument else ""
        for mark, dims in itertools.groupby(self.dims, lambda dim: dim.mark):
            text += mark + "".join(map(str, dims)) + CLOSING.get(mark, "")
        return text + "*" * self.repeated

    @property
    def names(self) -> tuple[str, ...]:
        """Letters of the operand, in order."""
        return tuple(dim.name for dim in self.dims)


@dataclass(frozen=True, slots=True)
class Factor:
    """One operand, or the operands of one function: "f(a, b)" has the ``head`` "f".

    "f" is any function, which is not taken as linear; HEADS has the others.
    """

    patterns: tuple[Pattern, ...]
    head: str = ""

    def __str__(self) -> str:
        inside = ", ".join(map(str, self.patterns))
        return f"{self.head}({inside})" if self.head else inside


@dataclass(frozen=True, slots=True)
class FormClause:
    """Clause of a rule that names a form: "mn by triangular" serves splits of m and n.

    Args:
        name: name of the form, the local code that runs in place of the op.
        letters: the dims whose splits it serves; without any it serves every signature.
        joined: the clause is "D joined by NAME": the form joins the ranks' results, so that the
            output is not P.
    """

    name: str
    letters: tuple[str, ...] = ()
    joined: bool = False

    def __str__(self) -> str:
        verb = "joined by" if self.joined else "by"
        return f"{''.join(self.letters)} {verb} {self.name}".strip()


@dataclass(frozen=True, slots=True)
class Condition:
    """Clause of a rule that says which calls it is for: "if left", "unless reduce is prod".

    Args:
        argument: the argument of the call that is looked at.
        negated: whether the clause begins with "unless".
        value: the text that the argument must equal; "" if it must be true.
    """

    argument: str
    negated: bool = False
    value: str = ""

    def __str__(self) -> str:
        text = f"{'unless' if self.negated else 'if'} {self.argument}"
        return f"{text} is {self.value}" if self.value else text


Clause = FormClause | Condition | str


@dataclass(frozen=True)  # without slots, for the cached properties
class Rule:
    """Rule of an op, parsed. "mn + mk, kn -> mn" has two terms, of one and two factors.

    Terms are added to each other. A term is a product of factors. Clauses follow the outputs, each
    after a semicolon.
    """

    terms: tuple[tuple[Factor, ...], ...]
    outs: tuple[Factor, ...]
    clauses: tuple[Clause, ...] = ()

    def __str__(self) -> str:
        left = " + ".join(", ".join(map(str, term)) for term in self.terms)
        right = ", ".join(map(str, self.outs))
        return "; ".join([f"{left} -> {right}".strip(), *map(str, self.clauses)])

    @cached_property
    def operands(self) -> tuple[tuple[int, str, Pattern], ...]:
        """(index of its term, function around it, pattern) of each operand, in order.

        "mn + f(n) -> mn" gives (0, "", mn), (1, "f", n).
        """
        return tuple(
            (term_index, factor.head, pattern)
            for term_index, term in enumerate(self.terms)
            for factor in term
            for pattern in factor.patterns
        )

    @cached_property
    def forms(self) -> tuple[FormClause, ...]:
        """Clauses of the rule that name a form."""
        return tuple(clause for clause in self.clauses if isinstance(clause, FormClause))

    @cached_property
    def conditions(self) -> tuple[Condition, ...]:
        """Conditions under which the rule applies to a call."""
        return tuple(clause for clause in self.clauses if isinstance(clause, Condition))

    @cached_property
    def flags(self) -> frozenset[str]:
        """Words among the clauses that are in FLAGS: "mn -> nm; moves" has the flag "moves"."""
        return frozenset(clause for clause in self.clauses if isinstance(clause, str))

    @cached_property
    def _dims(self) -> tuple[Dim, ...]:
        sides = [pattern for _, _, pattern in self.operands]
        sides += [pattern for out in self.outs for pattern in out.patterns]
        return tuple(dim for pattern in sides for dim in pattern.dims)

    @cached_property
    def has_capitals(self) -> bool:
        """True if a letter stands for the dims that an argument of the call names."""
        return any(dim.is_named_by_argument for dim in self._dims)

    @cached_property
    def is_elementwise(self) -> bool:
        """True if each element of the result depends only on the elements at its position."""
        plain = all(dim.name == DOTS and not dim.mark for dim in self._dims)
        return plain and not self.forms and all(out.head in ("", "shape") for out in self.outs)

    @cached_property
    def unsplit_letters(self) -> frozenset[str]:
        """Letters of dims with a mark, "[c]" or "<x>", which are not split as other letters are.

        Every rank has the whole dim, or fetches what it needs of it.
        """
        return frozenset(dim.name for dim in self._dims if dim.mark)

    @cached_property
    def fetched_letters(self) -> frozenset[str]:
        """Letters of dims "<x>", of which a rank fetches what it needs from its neighbours."""
        return frozenset(dim.name for dim in self._dims if dim.mark == "<")

    @cached_property
    def never_empty_letters(self) -> frozenset[str]:
        """Letters of dims "n!", of which no rank's part may be empty."""
        return frozenset(dim.name for dim in self._dims if dim.never_empty)

    @cached_property
    def new_letters(self) -> frozenset[str]:
        """Letters that occur on the right only: dims that the op makes."""
        left = {name for _, _, pattern in self.operands for name in pattern.names}
        return frozenset(dim.name for dim in self._dims) - left - {REST}
