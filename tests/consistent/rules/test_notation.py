"""The notation: what a rule string says, which signatures follow, and how faults are shown."""

from __future__ import annotations

import pytest

from consistent.rules import notation
from consistent.rules.notation import parse, signatures


def derived(rule: str, *shapes: tuple[int, ...], partial: notation.Partial = None) -> list[str]:
    return [str(s) for s in signatures(rule, shapes, partial)]


def test_parse_keeps_terms_operands_and_letters() -> None:
    rule = parse("...i, oi + o -> ...o")
    assert [[p.letters for p in term] for term in rule.terms] == [
        [("...", "i"), ("o", "i")],
        [("o",)],
    ]
    assert [p.letters for p in rule.outs] == [("...", "o")]
    assert rule.operands == 3


def test_brackets_mark_whole_letters() -> None:
    (pattern,) = parse("...[vw] -> ...[vw]").outs
    assert pattern.letters == ("...", "v", "w") and pattern.whole == {"v", "w"}


def test_matrix_product_derives_all_its_signatures() -> None:
    assert derived("mk, kn -> mn", (5, 4), (4, 7)) == [
        "B, B -> B",
        "S(0), B -> S(0)",
        "S(1), S(0) -> P",
        "B, S(1) -> S(1)",
        "P, B -> P",
        "B, P -> P",
    ]


def test_split_inner_dim_needs_a_bias_that_is_partial() -> None:
    assert "S(1), S(1), P -> P" in derived("...i, oi + o -> ...o", (5, 4), (7, 4), (7,))


def test_a_missing_last_operand_drops_its_term() -> None:
    assert "S(1), S(1) -> P" in derived("...i, oi + o -> ...o", (5, 4), (7, 4))


def test_dots_align_right() -> None:
    assert "S(2), S(0) -> S(2)" in derived("..., ... -> ...", (2, 5, 7), (7,))


def test_a_size_1_dim_that_broadcasts_stays_whole() -> None:
    made = derived("..., ... -> ...", (5, 1), (5, 7), partial="none")
    assert made == ["B, B -> B", "S(0), S(0) -> S(0)", "B, S(1) -> S(1)"]


def test_a_size_1_dim_in_all_operands_may_be_split() -> None:
    assert "S(0), S(0) -> S(0)" in derived("..., ... -> ...", (1,), (1,), partial="none")


def test_whole_letters_are_never_split() -> None:
    assert derived("...[v] -> ...[v]", (5, 7), partial="none") == ["B -> B", "S(0) -> S(0)"]


def test_a_repeated_letter_is_never_split() -> None:
    assert derived("ii -> i", (5, 5)) == ["B -> B", "P -> P"]


def test_each_term_has_one_partial_factor() -> None:
    made = derived("mn + mk, kn -> mn", (5, 7), (5, 4), (4, 7))
    assert "P, P, B -> P" in made and "P, B, P -> P" in made
    assert "P, B, B -> P" not in made and "B, P, B -> P" not in made


def test_partial_names_operands_that_are_partial_together() -> None:
    made = derived("...[v], [v], [v] -> ...[v]", (5, 7), (7,), (7,), partial=(1, 2))
    assert made == ["B, B, B -> B", "S(0), B, B -> S(0)", "B, P, P -> P"]


def test_a_letter_kept_in_some_outputs_only_is_never_split() -> None:
    assert derived("mn -> m, mn", (5, 7), partial="none") == ["B -> B, B", "S(0) -> S(0), S(0)"]


def test_scalars_have_no_dims_to_split() -> None:
    assert derived("..., ... -> ...", (), (), partial="none") == ["B, B -> B"]


@pytest.mark.parametrize(
    ("rule", "fault"),
    [
        ("mk, k?n -> mn", "?"),
        ("m] -> m", "]"),
        ("mn -> mx", "x"),
    ],
)
def test_a_fault_gets_a_caret(rule: str, fault: str) -> None:
    with pytest.raises(ValueError, match="rule:") as error:
        parse(rule)
    _, shown, caret, _ = str(error.value).splitlines()
    assert shown[caret.index("^")] == fault


@pytest.mark.parametrize("rule", ["mk, kn", "a -> b -> c"])
def test_a_rule_has_one_arrow(rule: str) -> None:
    with pytest.raises(ValueError, match="no single"):
        parse(rule)


def test_an_open_bracket_is_a_fault() -> None:
    with pytest.raises(ValueError, match="not closed"):
        parse("m[k -> m")


def test_shapes_must_fit_the_letters() -> None:
    with pytest.raises(ValueError, match="2 letters meets 3 dims"):
        signatures("mk, kn -> mn", ((2, 5, 4), (4, 7)))


def test_too_many_operands_are_an_error() -> None:
    with pytest.raises(ValueError, match="names 2 operands, and 3 are given"):
        signatures("mk, kn -> mn", ((5, 4), (4, 7), (7,)))
