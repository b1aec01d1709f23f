"""What a rule's text says, and how faults are shown."""

from __future__ import annotations

import pytest

from consistent.rules import ROWS
from consistent.rules.notation import parse
from consistent.rules.notation.rule import Condition, FormClause


def test_terms_operands_and_letters_are_kept() -> None:
    rule = parse("...i, oi + o -> ...o")
    assert [(term, pattern.names) for term, _, pattern in rule.operands] == [
        (0, ("...", "i")),
        (0, ("o", "i")),
        (1, ("o",)),
    ]
    assert [str(out) for out in rule.outs] == ["...o"]


def test_brackets_mark_whole_letters_and_exclamation_marks_filled_ones() -> None:
    rule = parse("nc![v]<w> -> nc![v]<w>")
    assert (
        rule.unsplit_letters == {"v", "w"}
        and rule.fetched_letters == {"w"}
        and rule.never_empty_letters == {"c"}
    )


def test_functions_stand_around_operands() -> None:
    assert [head for _, head, _ in parse("f(a, b), c + 1/(d) -> a").operands] == [
        "f", "f", "", "1/",
    ]  # fmt: skip


def test_a_pattern_may_name_its_argument() -> None:
    (_, _, x), (_, _, weight) = parse("...D, weight:D -> ...D").operands
    assert (x.argument, weight.argument) == ("", "weight")


def test_clauses_name_forms_conditions_and_properties() -> None:
    rule = parse("mn -> mn; mn by triangular; n joined by prod; unless reduce is prod; moves")
    assert rule.forms == (FormClause("triangular", ("m", "n")), FormClause("prod", ("n",), True))
    assert rule.conditions == (Condition("reduce", True, "prod"),)
    assert rule.flags == {"moves"}


@pytest.mark.parametrize("text", sorted({str(r) for row in ROWS.values() for r in row.rules}))
def test_a_rule_prints_as_what_parses_to_it(text: str) -> None:
    rule = parse(text)
    assert str(rule) == text
    assert parse(f"  {text.replace(', ', ' ,  ')} ") is rule


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("mk, k?n -> mn", "?"),
        ("m] -> m", "]"),
        ("mn -> mx", "x"),
        ("f(m, n -> m", "-"),
        ("m[k -> m", "-"),
        ("mDn -> m", "D"),
        ("m -> m; sometimes", "s"),
        ("m -> m; n by form", "f"),
    ],
)
def test_a_fault_gets_a_caret(text: str, fault: str) -> None:
    with pytest.raises(ValueError, match="rule:") as error:
        parse(text)
    _, shown, caret, _ = str(error.value).splitlines()
    assert shown[caret.index("^")] == fault


@pytest.mark.parametrize("text", ["mk, kn", "a -> b -> c"])
def test_a_rule_has_one_arrow(text: str) -> None:
    with pytest.raises(ValueError, match="no single"):
        parse(text)


def test_a_new_dim_is_marked() -> None:
    assert parse("... -> ...[c]").new_letters == {"c"}
