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

_made: dict[Rule, Rule] = {}  # equal rules of different texts are one object
_ARGUMENT = re.compile(r"\s*([A-Za-z][A-Za-z0-9_]*):")
_CONDITION = re.compile(r"(if|unless) (\w+)(?: is (\S+))?$")
_FORM = re.compile(r"(?:([a-zA-Z.]+) )?(joined )?by (\w+)$")


@cache
def parse(text: str) -> Rule:
    """Return the rule that ``text`` says, such as "mk, kn -> mn". Equal rules are one object.

    Raises:
        ValueError: the text is not a rule; the message has a caret under the fault.
    """
    rule = _Reader(text).rule()
    return _made.setdefault(rule, rule)


class _Reader:
    """Parser of one rule, from left to right; ``at`` is the index of the next character."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def rule(self) -> Rule:
        if self.text.partition(";")[0].count("->") != 1:
            raise self.fault('it has no single "->"', len(self.text))
        terms = [self._factors(HEADS)]
        while self._takes("+"):
            terms.append(self._factors(HEADS))
        if not self._takes("->"):
            raise self.fault(f'"{self._next()}" means nothing here')
        arrow = self.at
        outs = self._factors(OUT_HEADS)
        clauses = []
        while self._takes(";"):
            clauses.append(self._clause())
        if self._next():
            raise self.fault(f'"{self._next()}" means nothing here')
        rule = Rule(tuple(terms), outs, tuple(clauses))
        self._check(rule, arrow)
        return rule

    def _factors(self, heads: tuple[str, ...]) -> tuple[Factor, ...]:
        found = [self._factor(heads)]
        while self._takes(","):
            found.append(self._factor(heads))
        return tuple(found)

    def _factor(self, heads: tuple[str, ...]) -> Factor:
        for head in heads:
            if self._takes(f"{head}("):
                patterns = [self._pattern()]
                while self._takes(","):
                    patterns.append(self._pattern())
                if not self._takes(")"):
                    raise self.fault('"(" is not closed')
                return Factor(tuple(patterns), head)
        return Factor((self._pattern(),))

    def _pattern(self) -> Pattern:
        argument = _ARGUMENT.match(self.text, self.at)
        if argument:
            self.at = argument.end()
        dims, mark = [], ""
        while True:
            if mark and self._takes(CLOSING[mark]):
                mark = ""
            elif not mark and self._next() in CLOSING:
                mark = self._next()
                self._takes(mark)
            elif name := self._name():
                dims.append(Dim(name, mark, self._takes("!")))
            elif mark:
                raise self.fault(f'"{mark}" is not closed')
            else:
                break
        capitals = [dim.name for dim in dims if dim.is_named_by_argument]
        if capitals and len(dims) > 1 and {dim.name for dim in dims} != {DOTS, capitals[0]}:
            at = self.text.rindex(capitals[-1], 0, self.at)
            raise self.fault(f'"{capitals[-1]}" stands beside "..." or alone', at)
        return Pattern(tuple(dims), argument[1] if argument else "", self._takes("*"))

    def _name(self) -> str:
        if self._takes(DOTS):
            return DOTS
        char = self._next()
        return char if (char.isalpha() or char == REST) and self._takes(char) else ""

    def _clause(self) -> Clause:
        self._next()
        end = self.text.find(";", self.at)
        start, end = self.at, len(self.text) if end < 0 else end
        text, self.at = " ".join(self.text[start:end].split()), end
        if text in FLAGS:
            return text
        if found := _CONDITION.match(text):
            return Condition(found[2], found[1] == "unless", found[3] or "")
        if found := _FORM.match(text):
            letters = tuple(re.findall(r"\.\.\.|[a-zA-Z]", found[1] or ""))
            return FormClause(found[3], letters, bool(found[2]))
        raise self.fault(f'"{text}" is not a clause', start)

    def _check(self, rule: Rule, arrow: int) -> None:
        for name in sorted(rule.new):
            marked = all(
                dim.mark for out in rule.outs for p in out.patterns for dim in p.dims
                if dim.name == name
            )  # fmt: skip
            if not marked:
                at = self.text.index(name, arrow)
                raise self.fault(f'"{name}" is on the right only; a new dim is "[{name}]"', at)
        for form in rule.forms:
            for name in form.letters:
                if not any(name in pattern.names for _, _, pattern in rule.operands):
                    at = self.text.index(form.name)
                    raise self.fault(f'no operand has the letter "{name}"', at)

    # -- characters --------------------------------------------------------------------------------

    def _next(self) -> str:
        while self.at < len(self.text) and self.text[self.at] == " ":
            self.at += 1
        return self.text[self.at : self.at + 1]

    def _takes(self, token: str) -> bool:
        self._next()
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
