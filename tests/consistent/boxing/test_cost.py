"""Bytes and seconds of moves."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from consistent.boxing.cost import move_bytes
from consistent.spec import B, P, S, piece


def sent_by(k: int, src, dst, whole, parts) -> int:
    """Items that rank ``k`` sends, counted from the boxes of all ranks."""
    size = math.prod(whole)

    def part(entry, index):
        return size // whole[entry.dim] * piece(whole[entry.dim], parts, index)[1] if size else 0

    others = [r for r in range(parts) if r != k]
    if src.is_split and dst.is_broadcast:
        return sum(part(src, k) for _ in others)
    if src.is_partial and dst.is_split:
        return sum(part(dst, r) for r in others)
    if src.is_split and dst.is_split:
        rest = size // (whole[src.dim] * whole[dst.dim]) if size else 0
        held = piece(whole[src.dim], parts, k)[1]
        return sum(held * piece(whole[dst.dim], parts, r)[1] * rest for r in others)
    if src.is_partial and dst.is_broadcast:
        return math.ceil(2 * (parts - 1) * size / parts)
    return 0


@given(st.tuples(st.integers(0, 9), st.integers(0, 9), st.integers(1, 2)), st.integers(1, 6))
def test_bytes_are_those_of_the_busiest_rank(whole, parts):
    for src, dst in itertools.permutations((B, P, S(0), S(1)), 2):
        expected = max(sent_by(k, src, dst, whole, parts) for k in range(parts))
        assert move_bytes(src, dst, whole, parts, 1)[0] == expected, (src, dst)


def test_uneven_pieces_are_not_padded():
    # 7 rows of 4 bytes on 3 ranks: 3, 2, 2. Rank 0 sends its 3 rows to 2 others.
    assert move_bytes(S(0), B, (7,), 3, 4) == (24, 28)
    # Rank 2 keeps 2 of 7 rows and sends 5.
    assert move_bytes(P, S(0), (7,), 3, 4) == (20, 12)


def test_local_moves_send_nothing():
    for src, dst in [(B, S(0)), (B, P), (S(0), P)]:
        assert move_bytes(src, dst, (7,), 3, 4)[0] == 0


def test_one_rank_sends_nothing():
    for src, dst in itertools.permutations((B, P, S(0), S(1)), 2):
        assert move_bytes(src, dst, (7, 5), 1, 4)[0] == 0
