"""What benchmarks/op_coverage.py lays out and counts."""

from __future__ import annotations

import torch

from benchmarks.coverage_cases import addend, is_even, layouts
from benchmarks.op_coverage import show, summary

X, W = torch.zeros(4, 3), torch.zeros(3)


def test_every_dim_is_split_alone_and_with_the_others_and_all_is_partial() -> None:
    names = [name for name, _ in layouts([X, X], (2,))]
    assert names == "B|S(0)|S(0) all|S(1)|S(1) all|P|P all|S(0) second|S(1) second".split("|")


def test_a_grid_pairs_the_layouts_of_its_axes() -> None:
    hows = {how[0] for _, how in layouts([W], (2, 2))}
    assert hows == {(a, b) for a in (None, 0, "P") for b in (None, 0, "P")}


def test_a_split_is_even_if_all_its_pieces_are() -> None:
    assert is_even([X], ((0,),), (2,)) and not is_even([X], ((0,),), (3,))
    assert is_even([X], ((0, 0),), (2, 2)) and not is_even([X], ((1, None),), (2, 2))


def test_addends_of_a_partial_tensor_are_no_zeros_and_add_up_exactly() -> None:
    x = torch.randn(3, 4)
    for parts in (2, 3):
        held = [addend(x, parts, k) for k in range(parts)]
        assert torch.equal(sum(held[1:], held[0]), x)
        assert all(each.abs().min() > 0 for each in held)


def test_the_table_counts_cases_and_names_operators() -> None:
    row = dict(side="ours", mode="forward", even=False, outcome="right")
    bad = {**row, "outcome": "wrong", "layout": "S(0)", "message": "1 for 2"}
    text = show("2 ranks", {"sin": summary("sin", [row, row, row, bad], 1.0)})
    assert "| ours forward | 4 | 75.0 % | 75.0 % | 0 | 1 | 0 | 0 | 0 of 1 |" in text
    assert "**ours, forward, wrong** (1): sin" in text
