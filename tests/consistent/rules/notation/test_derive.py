"""Which signatures follow from a rule."""

from __future__ import annotations

import pytest

from consistent.rules import DoesNotFit
from consistent.rules.notation import signatures


def derived(rule: str, *shapes: tuple[int, ...]) -> list[str]:
    return [str(s) for s in signatures(rule, shapes)]


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
    made = derived("f(..., ...) -> ...", (5, 1), (5, 7))
    assert made == ["B, B -> B", "S(0), S(0) -> S(0)", "B, S(1) -> S(1)"]


def test_a_size_1_dim_in_all_operands_may_be_split() -> None:
    assert "S(0), S(0) -> S(0)" in derived("f(..., ...) -> ...", (1,), (1,))


def test_whole_letters_are_never_split() -> None:
    assert derived("f(...[v]) -> ...[v]", (5, 7)) == ["B -> B", "S(0) -> S(0)"]


def test_a_repeated_letter_is_never_split() -> None:
    assert derived("ii -> i", (5, 5)) == ["B -> B", "P -> P"]


def test_each_term_has_one_partial_factor() -> None:
    made = derived("mn + mk, kn -> mn", (5, 7), (5, 4), (4, 7))
    assert "P, P, B -> P" in made and "P, B, P -> P" in made
    assert "P, B, B -> P" not in made and "B, P, B -> P" not in made


def test_a_letter_kept_in_some_outputs_only_is_never_split() -> None:
    assert derived("f(mn) -> m, mn", (5, 7)) == ["B -> B, B", "S(0) -> S(0), S(0)"]


def test_scalars_have_no_dims_to_split() -> None:
    assert derived("f(..., ...) -> ...", (), ()) == ["B, B -> B"]


def test_an_operand_has_as_many_dims_as_letters() -> None:
    with pytest.raises(DoesNotFit, match="2 letters meets 3 dims"):
        signatures("mk, kn -> mn", ((2, 5, 4), (4, 7)))


def test_too_many_operands_do_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="names 2 operands, and 3 are given"):
        signatures("mk, kn -> mn", ((5, 4), (4, 7), (7,)))


# -- functions -------------------------------------------------------------------------------------


def test_no_addend_passes_a_function() -> None:
    assert derived("f(..., ...) -> ...", (5,), (5,)) == ["B, B -> B", "S(0), S(0) -> S(0)"]


def test_what_is_outside_the_function_is_linear() -> None:
    assert "B, P -> P" in derived("f(mk), kn -> mn", (5, 4), (4, 7))
    assert "P, B -> P" not in derived("f(mk), kn -> mn", (5, 4), (4, 7))


def test_a_sum_of_a_function_is_partial() -> None:
    assert derived("f(m) -> ", (5,)) == ["B -> B", "S(0) -> P"]


def test_an_elementwise_product_may_hold_an_infinity_and_passes_no_addends() -> None:
    assert derived("..., ... -> ...", (5,), (5,)) == ["B, B -> B", "S(0), S(0) -> S(0)"]
    assert "P, B -> P" not in derived("..., 1/(...) -> ...", (5,), (5,))


def test_the_larger_of_two_distributes() -> None:
    made = derived("max(..., ...) -> ...", (5,), (5,))
    assert "P(max), P(max) -> P(max)" in made and "B, P(min) -> P(min)" in made
    assert "P(min), P(min) -> P(min)" not in made


def test_a_maximum_over_a_split_dim_is_a_bound_or_is_joined() -> None:
    made = derived("max(mn) -> m; n by bound; n joined by best", (5, 7))
    assert made == [
        "B -> B", "P(max) -> P(max)", "S(0) -> S(0)",
        "S(1) -> P(max) by bound", "S(1) -> B by best",
    ]  # fmt: skip


def test_of_a_shape_no_value_is_read() -> None:
    made = derived("shape(...) -> ...", (5,))
    assert made == ["B -> B", "S(0) -> S(0)", "P -> B", "P(max) -> B", "P(min) -> B"]
    assert derived("shape(m) -> [n]", (5,))[1] == "S(0) -> B"


def test_the_output_of_which_only_the_shape_counts_is_never_partial() -> None:
    assert "P -> P, B" in derived("... -> ..., shape(...)", (5,))


# -- forms -----------------------------------------------------------------------------------------


def test_a_form_serves_a_split_of_its_letter() -> None:
    assert derived("f(mn) -> mn; n by softmax", (5, 7))[-1] == "S(1) -> S(1) by softmax"
    assert derived("mn -> m; n by mean", (5, 7))[2:] == ["S(1) -> P by mean", "P -> P"]
    assert derived("f(mn) -> m; n joined by prod", (5, 7))[-1] == "S(1) -> B by prod"


def test_a_form_without_letters_serves_all() -> None:
    made = derived("... -> ...; by dropout", (5,))
    assert made == ["B -> B by dropout", "S(0) -> S(0) by dropout", "P -> P by dropout"]


def test_no_form_serves_a_dim_that_is_broadcast() -> None:
    assert derived("f(...n, ...n) -> ...; n joined by cosine", (5, 7), (5, 1)) == [
        "B, B -> B", "S(0), S(0) -> S(0)",
    ]  # fmt: skip


# -- any number of operands ------------------------------------------------------------------------


def test_repeated_operands_are_terms() -> None:
    made = derived("...* -> ...", (5,))
    assert made == ["B -> B", "S(0) -> S(0)", "P -> P"]
