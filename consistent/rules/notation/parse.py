"""Parser of the text of a rule into a ``Rule``. Its errors show the fault with a caret under it."""

from __future__ import annotations

import re
from functools import cache

from .rule import (
    CLOSING,
    DOTS,
    FLAGS,
    HEADS,
    OUT_HEADS,
    REST,
    Clause,
    Condition,
    Dim,
    Factor,
    FormClause,
    Pattern,
    Rule,
)

_interned_rules: dict[Rule, Rule] = {}  # equal rules of different texts are one object
_ARGUMENT = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*):")
_CONDITION = re.compile(r"(if|unless) (\w+)(?: is (\S+))?$")
_FORM = re.compile(r"(?:([a-zA-Z.]+) )?(joined )?by (\w+)$")


@cache
def parse(text: str) -> Rule:
    """Return the rule that ``text`` says, such as "mk, kn -> mn". Equal rules are one object.

    Raises:
        ValueError: the text is not a rule; the message has a caret under the fault.
    """
    rule = _Parser(text).rule()
    return _interned_rules.setdefault(rule, rule)


class _Parser:
    """Parser of one rule, from left to right; ``at`` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def rule(self) -> Rule:
        if self.text.partition(";")[0].count("->") != 1:
            raise self.fault('it has no single "->"', len(self.text))
        terms = [self._factors(HEADS)]
        while self._accept("+"):
            terms.append(self._factors(HEADS))
        if not self._accept("->"):
            raise self.fault(f'"{self._peek()}" means nothing here')
        arrow = self.at
        outs = self._factors(OUT_HEADS)
        clauses = []
        while self._accept(";"):
            clauses.append(self._clause())
        if self._peek():
            raise self.fault(f'"{self._peek()}" means nothing here')
        rule = Rule(tuple(terms), outs, tuple(clauses))
        self._check_letters(rule, arrow)
        return rule

    def _factors(self, heads: tuple[str, ...]) -> tuple[Factor, ...]:
        factors = [self._factor(heads)]
        while self._accept(","):
            factors.append(self._factor(heads))
        return tuple(factors)

    def _factor(self, heads: tuple[str, ...]) -> Factor:
        for head in heads:
            if self._accept(f"{head}("):
                patterns = [self._pattern()]
                while self._accept(","):
                    patterns.append(self._pattern())
                if not self._accept(")"):
                    raise self.fault('"(" is not closed')
                return Factor(tuple(patterns), head)
        return Factor((self._pattern(),))

    def _pattern(self) -> Pattern:
        argument = _ARGUMENT.match(self.text, self.at)
        if argument:
            self.at = argument.end()
        dims, mark = [], ""
        while True:
            if mark and self._accept(CLOSING[mark]):
                mark = ""
            elif not mark and self._peek() in CLOSING:
                mark = self._peek()
                self._accept(mark)
            elif name := self._dim_name():
                dims.append(Dim(name, mark, self._accept("!")))
            elif mark:
                raise self.fault(f'"{mark}" is not closed')
            else:
                break
        capitals = [dim.name for dim in dims if dim.is_named_by_argument]
        if capitals and len(dims) > 1 and {dim.name for dim in dims} != {DOTS, capitals[0]}:
            at = self.text.rindex(capitals[-1], 0, self.at)
            raise self.fault(f'"{capitals[-1]}" stands beside "..." or alone', at)
        return Pattern(tuple(dims), argument[1] if argument else "", self._accept("*"))

    def _dim_name(self) -> str:
        if self._accept(DOTS):
            return DOTS
        char = self._peek()
        return char if (char.isalpha() or char == REST) and self._accept(char) else ""

    def _clause(self) -> Clause:
        self._peek()
        end = self.text.find(";", self.at)
        start, end = self.at, len(self.text) if end < 0 else end
        text, self.at = " ".join(self.text[start:end].split()), end
        if text in FLAGS:
            return text
        if matched := _CONDITION.match(text):
            return Condition(matched[2], matched[1] == "unless", matched[3] or "")
        if matched := _FORM.match(text):
            letters = tuple(re.findall(r"\.\.\.|[a-zA-Z]", matched[1] or ""))
            return FormClause(matched[3], letters, bool(matched[2]))
        raise self.fault(f'"{text}" is not a clause', start)

    def _check_letters(self, rule: Rule, arrow: int) -> None:
        for name in sorted(rule.new_letters):
            is_marked = all(
                dim.mark for out in rule.outs for p in out.patterns for dim in p.dims
                if dim.name == name
            )  # fmt: skip
            if not is_marked:
                at = self.text.index(name, arrow)
                raise self.fault(f'"{name}" is on the right only; a new dim is "[{name}]"', at)
        for form in rule.forms:
            for name in form.letters:
                if not any(name in pattern.names for _, _, pattern in rule.operands):
                    at = self.text.index(form.name)
                    raise self.fault(f'no operand has the letter "{name}"', at)

    # -- characters --------------------------------------------------------------------------------

    def _peek(self) -> str:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _accept(self, token: str) -> bool:
        self._peek()
        if not self.text.startswith(token, self.at):
            return False
        self.at += len(token)
        return True

    def fault(self, why: str, at: int | None = None) -> ValueError:
        at = self.at if at is None else at
        return ValueError(
            f"rule: {why}:\n  {self.text}\n  {' ' * at}^\n"
            'Write operands, "->" and outputs, such as "mk, kn -> mn" (docs/adding_an_op.md).'
        )
