"""Views of dims that are cut in other ways: by hand, and every view that is claimed by running."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from consistent.rules.layout.cut_views import split_of_view
from consistent.rules.layout.view import dim_groups
from consistent.spec import S, Split
from tests.reference import cut as shards_of
from tests.strategies import cuts


def made(entry: Split, source: tuple[int, ...], target: tuple[int, ...], parts: int = 2):
    return split_of_view(entry, dim_groups(source, target), source, target, parts)


@pytest.mark.parametrize(
    ("source", "target", "entry", "found"),
    [
        ((2, 8), (16,), S(1, cut="zigzag"), S(0, cut="zigzag", of=8)),
        ((16,), (2, 8), S(0, cut="zigzag", of=8), S(1, cut="zigzag")),
        ((2, 8, 3), (16, 3), S(1, blocks=3), S(0, blocks=3, of=8)),
        ((2, 3, 8), (2, 24), S(2, sizes=(5, 3)), S(1, sizes=(5, 3), of=8)),
        ((12,), (3, 4), S(0, of=4), S(1)),
        ((12,), (3, 4), S(0, blocks=4), S(0, blocks=1)),
        ((3, 4), (12,), S(0, blocks=1), S(0, blocks=4)),
        ((8, 3), (24,), S(0, cut="zigzag"), S(0, cut="zigzag")),
        ((9, 3), (27,), S(0, cut="zigzag"), None),
        ((24,), (8, 3), S(0, sizes=(6, 18)), S(0, sizes=(2, 6))),
        ((24,), (8, 3), S(0, sizes=(5, 19)), None),
        ((24, 5), (2, 12, 5), S(0, of=(4, 8, 4, 8)), S(1, of=(4, 8))),
        ((2, 8, 5), (2, 8, 5), S(1, cut="zigzag"), S(1, cut="zigzag")),
        ((2, 8, 6), (2, 8, 2, 3), S(1, cut="zigzag"), S(1, cut="zigzag")),
    ],
    ids=str,
)
def test_what_becomes_of_a_cut(source, target, entry, found):
    assert made(entry, source, target) is found


@given(st.data(), st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3))
def test_shards_of_a_view_are_views_of_shards(data, factors, parts):
    def shape() -> tuple[int, ...]:
        ends = data.draw(st.lists(st.booleans(), min_size=len(factors), max_size=len(factors)))
        sizes = [1]
        for factor, end in zip(factors, ends, strict=True):
            sizes[-1] *= factor
            if end:
                sizes.append(1)
        return tuple(sizes)

    source, target = shape(), shape()
    dim = data.draw(st.integers(0, len(source) - 1))
    entry = Split(dim, data.draw(cuts(source[dim], parts)))
    out = made(entry, source, target, parts)
    if out is None:
        return
    x, random = torch.arange(torch.Size(source).numel()).view(source), torch.Generator()
    have = shards_of(x, (entry,), (parts,), random)
    want = shards_of(x.view(target), (out,), (parts,), random)
    for a, b in zip(have, want, strict=True):
        assert torch.equal(a.reshape(b.shape), b)
