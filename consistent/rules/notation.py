"""Rule notation: ``"mk, kn -> mn"`` -> every signature of the op.

``,`` multiplies, ``+`` adds terms, a letter missing on the right is summed away, ``[v]`` must be
whole on every rank, ``...`` stands for all other dims, aligned right; a dim of size 1 that
broadcasts counts as absent. Several outputs are separated by ``,`` on the right. Operands that a
call leaves out (no bias) are dropped from the end of the rule.

For one axis of the placement the rule gives: * every tensor B; * a letter kept on the right: S
where it occurs, B elsewhere, output S; * a letter summed away: S where it occurs in its term, B for
the rest of that term, P for the other terms, output P; * linearity: one P in each term, B
elsewhere, output P. ``partial="none"`` switches this off; a tuple of operand indices says which
operands are P together, the rest B.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

from ..spec import B, P, S, Sbp
from .signature import Signature

Partial = str | tuple[int, ...] | None


@dataclass(frozen=True, slots=True)
class Pattern:
    """One operand or output: its letters in order ("..." among them); some must be whole."""

    letters: tuple[str, ...]
    whole: frozenset[str]


@dataclass(frozen=True, slots=True)
class Rule:
    """A parsed rule: terms of operand patterns on the left, output patterns on the right."""

    text: str
    terms: tuple[tuple[Pattern, ...], ...]
    outs: tuple[Pattern, ...]

    @property
    def operands(self) -> int:
        """How many operands the rule names."""
        return sum(len(term) for term in self.terms)


@cache
def parse(text: str) -> Rule:
    """Read a rule.

    Raises:
        ValueError: the text is not a rule; the message has a caret under the fault.
    """
    if text.count("->") != 1:
        raise _error(text, len(text), 'has no single "->"')
    arrow = text.index("->")
    terms, position = [], 0
    for term in text[:arrow].split("+"):
        patterns = []
        for operand in term.split(","):
            patterns.append(_pattern(text, operand, position))
            position += len(operand) + 1
        terms.append(tuple(patterns))
    outs, position = [], arrow + 2
    for operand in text[arrow + 2 :].split(","):
        outs.append(_pattern(text, operand, position))
        position += len(operand) + 1
    known = {letter for term in terms for pattern in term for letter in pattern.letters}
    for pattern in outs:
        for letter in pattern.letters:
            if letter not in known:
                raise _error(text, text.index(letter, arrow), f'"{letter}" is on the right only')
    return Rule(text, tuple(terms), tuple(outs))


def _pattern(text: str, operand: str, offset: int) -> Pattern:
    letters: list[str] = []
    whole: set[str] = set()
    inside = False
    position = 0
    while position < len(operand):
        char = operand[position]
        if operand.startswith("...", position):
            letters.append("...")
            position += 3
            continue
        if char == "[" and not inside:
            inside = True
        elif char == "]" and inside:
            inside = False
        elif char.isalpha():
            letters.append(char)
            if inside:
                whole.add(char)
        elif char != " ":
            raise _error(text, offset + position, f'"{char}" means nothing here')
        position += 1
    if inside:
        raise _error(text, offset + len(operand) - 1, '"[" is not closed')
    return Pattern(tuple(letters), frozenset(whole))


def _error(text: str, position: int, why: str) -> ValueError:
    return ValueError(
        f"rule: {why}:\n  {text}\n  {' ' * position}^\n"
        'Write operands, "->" and outputs, such as "mk, kn -> mn".'
    )


def signatures(
    text: str, shapes: Iterable[Sequence[int]], partial: Partial = None
) -> tuple[Signature, ...]:
    """All signatures on one axis of a rule applied to operands of the given logical shapes."""
    # A rule asks of a size only whether it is 1, so one derivation serves all other sizes.
    return _signatures(text, tuple(tuple(1 if n == 1 else 2 for n in s) for s in shapes), partial)


@lru_cache(maxsize=65536)
def _signatures(
    text: str, shapes: tuple[tuple[int, ...], ...], partial: Partial
) -> tuple[Signature, ...]:
    rule = parse(text)
    terms = _present(rule, len(shapes))
    patterns = [pattern for term in terms for pattern in term]
    letters = [_expand(p, len(s)) for p, s in zip(patterns, shapes, strict=True)]
    outs = [_expand_out(pattern, letters, patterns) for pattern in rule.outs]
    sizes = _sizes(letters, shapes)
    whole = {letter for pattern in patterns for letter in pattern.whole}
    term_of = [t for t, term in enumerate(terms) for _ in term]
    made = [Signature((B,) * len(patterns), (B,) * len(outs))]
    for letter in dict.fromkeys(itertools.chain(*letters)):
        if letter in whole or any(names.count(letter) > 1 for names in letters):
            continue
        made.extend(_split_letter(letter, letters, shapes, sizes, outs, term_of))
    made.extend(_linear(len(patterns), len(outs), term_of, partial))
    return tuple(dict.fromkeys(made))


def out_shapes(text: str, shapes: Sequence[Sequence[int]]) -> list[tuple[int, ...]] | None:
    """Logical shapes of the outputs as the letters give them; None if sizes disagree."""
    rule = parse(text)
    terms = _present(rule, len(shapes))
    patterns = [pattern for term in terms for pattern in term]
    letters = [_expand(p, len(s)) for p, s in zip(patterns, shapes, strict=True)]
    sizes = _sizes(letters, shapes)
    for names, shape in zip(letters, shapes, strict=True):
        if any(n != sizes[name] and n != 1 for name, n in zip(names, shape, strict=True)):
            return None
    outs = [_expand_out(pattern, letters, patterns) for pattern in rule.outs]
    return [tuple(sizes[name] for name in names) for names in outs]


def _present(rule: Rule, count: int) -> tuple[tuple[Pattern, ...], ...]:
    terms, left = [], count
    for term in rule.terms:
        if left:
            terms.append(term[:left])
            left -= len(terms[-1])
    if left:
        raise ValueError(
            f'rule "{rule.text}" names {rule.operands} operands, and {count} are given.'
        )
    return tuple(terms)


def _expand(pattern: Pattern, ndim: int) -> tuple[str, ...]:
    """Letters of one operand with ``...`` spelled out; its dims are numbered from the right."""
    if "..." not in pattern.letters:
        if len(pattern.letters) != ndim:
            raise ValueError(f"a pattern of {len(pattern.letters)} letters meets {ndim} dims")
        return pattern.letters
    at = pattern.letters.index("...")
    rest = ndim - len(pattern.letters) + 1
    if rest < 0:
        raise ValueError(f"a pattern of {len(pattern.letters) - 1} letters meets {ndim} dims")
    dots = tuple(f".{rest - 1 - i}" for i in range(rest))
    return pattern.letters[:at] + dots + pattern.letters[at + 1 :]


def _expand_out(
    pattern: Pattern, letters: Sequence[tuple[str, ...]], patterns: Sequence[Pattern]
) -> tuple[str, ...]:
    """Letters of an output; its ``...`` is as long as the longest one on the left."""
    if "..." not in pattern.letters:
        return pattern.letters
    rest = max(
        (
            len(names) - len(p.letters) + 1
            for names, p in zip(letters, patterns, strict=True)
            if "..." in p.letters
        ),
        default=0,
    )
    return _expand(pattern, len(pattern.letters) - 1 + rest)


def _sizes(letters: Sequence[tuple[str, ...]], shapes: Sequence[Sequence[int]]) -> dict[str, int]:
    """Logical size of each letter: 1 gives way to any other size."""
    sizes: dict[str, int] = {}
    for names, shape in zip(letters, shapes, strict=True):
        for name, n in zip(names, shape, strict=True):
            if sizes.get(name, 1) == 1:
                sizes[name] = n
    return sizes


def _split_letter(
    letter: str,
    letters: Sequence[tuple[str, ...]],
    shapes: Sequence[tuple[int, ...]],
    sizes: dict[str, int],
    outs: Sequence[tuple[str, ...]],
    term_of: Sequence[int],
) -> list[Signature]:
    at: list[Sbp] = []
    for names, shape in zip(letters, shapes, strict=True):
        dim = names.index(letter) if letter in names else None
        absent = dim is None or (shape[dim] == 1 and sizes[letter] != 1)
        at.append(B if absent else S(dim))  # type: ignore[arg-type]
    if all(entry is B for entry in at):
        return []
    kept = [letter in names for names in outs]
    if all(kept):
        return [Signature(tuple(at), tuple(S(names.index(letter)) for names in outs))]
    if any(kept):
        return []
    in_term = {term_of[i] for i, names in enumerate(letters) if letter in names}
    if len(in_term) != 1:
        return []
    (term,) = in_term
    others = tuple(at[i] if term_of[i] == term else P for i in range(len(letters)))
    return [Signature(others, (P,) * len(outs))]


def _linear(count: int, outs: int, term_of: Sequence[int], partial: Partial) -> list[Signature]:
    if partial == "none":
        return []
    if isinstance(partial, tuple):
        chosen = tuple(P if i in partial else B for i in range(count))
        return [Signature(chosen, (P,) * outs)] if any(e is P for e in chosen) else []
    by_term = [
        [i for i in range(count) if term_of[i] == term]
        for term in range(max(term_of, default=-1) + 1)
    ]
    made = []
    for pick in itertools.product(*by_term):
        made.append(Signature(tuple(P if i in pick else B for i in range(count)), (P,) * outs))
    return made
