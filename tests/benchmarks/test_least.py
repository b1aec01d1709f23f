"""The bound that benchmarks/op_bytes.py prints, on calls small enough to count by hand."""

from __future__ import annotations

from benchmarks.least import Case, along, least, letters, pointwise, reduction, rows_sent

MATMUL = Case(shapes=((4, 6), (6, 8)), items=(4, 4), out=(4, 8), out_item=4, n=2)
ROWS = Case(shapes=((4, 6),), items=(4,), out=(4, 6), out_item=4, n=2)


def test_a_kept_letter_costs_nothing() -> None:
    assert least(letters("mk,kn->mn"), MATMUL, (0, None)) == 0
    assert least(letters("mk,kn->mn"), MATMUL, (None, 1)) == 0


def test_a_split_inner_dim_is_reduced_or_moved_whichever_is_less() -> None:
    # Half of the [4, 8] result, or a quarter of the [4, 6] input to another dim.
    assert least(letters("mk,kn->mn"), MATMUL, (1, 0)) == 4 * 8 * 4 / 2
    assert least(letters("mk,kn->mn"), MATMUL, (1, None)) == 4 * 6 * 4 / 4


def test_elements_cost_nothing_and_rows_a_number_each() -> None:
    assert least(pointwise, ROWS, (1,)) == 0
    assert least(along(-1, numbers=1), ROWS, (1,)) == 4 * 4
    assert least(along(-1, per=rows_sent(1, 1)), ROWS, (1,)) == 4 * 4


def test_a_sum_owes_half_of_the_result_and_all_of_one_number() -> None:
    summed = Case(shapes=((4, 6),), items=(4,), out=(4,), out_item=4, n=2)
    assert least(reduction(-1), summed, (1,)) == 4 * 4 / 2
    number = Case(shapes=((4, 6),), items=(4,), out=(), out_item=4, n=2)
    assert least(reduction(), number, (1,)) == 4
