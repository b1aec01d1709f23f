"""Chunks of a boxing are tensors of their own, and together all rows."""

from __future__ import annotations

import itertools

import pytest
import torch

from consistent.boxing.chunks import affordable_chunks, cut_into_chunks
from consistent.spec import B, NdSbp, P, Placement, S, TensorSpec

# (grid, src, dst)
WAYS = [
    ((3,), (S(0),), (B,)),
    ((3,), (P,), (S(0),)),
    ((3,), (P,), (B,)),
    ((3,), (P,), (S(1),)),
    ((3,), (S(1),), (B,)),
    ((2, 3), (S(0), P), (S(0), B)),
    ((2, 3), (S(0), P), (S(0), S(0))),
    ((2, 3), (S(0), S(0)), (S(0), B)),
    ((2, 2), (P, P), (S(0), S(0))),
    ((2, 2), (P, B), (S(0), B)),
]


def _specs(
    rows: int, grid: tuple[int, ...], src: NdSbp, dst: NdSbp
) -> tuple[TensorSpec, TensorSpec]:
    placement = Placement("cpu", torch.arange(torch.Size(grid).numel()).view(grid).numpy())
    a, b = (TensorSpec.of(placement, sbp, (rows, 4), torch.float32) for sbp in (src, dst))
    return a, b


@pytest.mark.parametrize(("grid", "src", "dst"), WAYS)
def test_each_rank_has_the_rows_that_the_spec_of_a_chunk_says(
    grid: tuple[int, ...], src: NdSbp, dst: NdSbp
) -> None:
    for rows, count in itertools.product(range(12), range(1, 6)):
        before, after = _specs(rows, grid, src, dst)
        for at in itertools.product(*map(range, grid)):
            chunks = cut_into_chunks(before, after, count, at)
            for side, name in ((before, "src"), (after, "dst")):
                seen: list[int] = []
                for chunk in chunks:
                    places = getattr(chunk, f"{name}_rows")
                    held = [row for place in places for row in range(place.start, place.stop)]
                    assert len(held) == getattr(chunk, name).local_shape(at)[0]
                    seen += held
                assert sorted(seen) == list(range(side.local_shape(at)[0]))


@pytest.mark.parametrize(("grid", "src", "dst"), WAYS)
def test_a_row_is_in_the_same_chunk_at_the_same_place_before_and_after(
    grid: tuple[int, ...], src: NdSbp, dst: NdSbp
) -> None:
    before, after = _specs(11, grid, src, dst)
    for at in itertools.product(*map(range, grid)):
        for chunk in cut_into_chunks(before, after, 3, at):
            fine = before if len(chunk.src_rows) == 1 else after
            other, places = (after, chunk.dst_rows) if fine is before else (before, chunk.src_rows)
            small, wide = (chunk.src, chunk.dst) if fine is before else (chunk.dst, chunk.src)
            own = chunk.src_rows if fine is before else chunk.dst_rows
            logical = [other.region(at)[0][0] + r for p in places for r in range(p.start, p.stop)]
            start = small.region(at)[0][0] - wide.region(at)[0][0]
            size = small.local_shape(at)[0]
            begin = fine.region(at)[0][0] + own[0].start
            assert logical[start : start + size] == list(range(begin, begin + size))


def test_rows_that_come_from_afar_are_not_cut() -> None:
    src, dst = _specs(8, (2, 2), (S(0), S(0)), (B, S(0)))
    assert len(cut_into_chunks(src, dst, 4, (0, 0))) == 1


def test_no_chunk_is_empty() -> None:
    src, dst = _specs(2, (3,), (P,), (B,))
    assert [chunk.src.shape[0] for chunk in cut_into_chunks(src, dst, 5, (0,))] == [1, 1]


def test_chunks_are_worth_it_while_sending_one_takes_much_longer_than_to_begin() -> None:
    placement = Placement("cpu", range(2))
    found = []
    for rows in (16, 1 << 18, 1 << 20, 1 << 21):
        ends = [TensorSpec.of(placement, (e,), (rows, 1), torch.float32) for e in (P, B)]
        found.append(affordable_chunks(ends[0], ends[1], 4, 285_000))
    assert found == [1, 1, 3, 4]
