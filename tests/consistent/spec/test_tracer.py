"""Tests of subscribing to what a program does."""

from __future__ import annotations

from consistent.spec.tracer import Tracer, callbacks


def test_a_tracer_ends_with_its_block_and_one_that_is_entered_for_always_stays() -> None:
    moves, before = callbacks("on_move"), list(callbacks("on_move"))
    met: list[str] = []
    lasting, passing = (lambda: met.append("lasting")), (lambda: met.append("passing"))
    Tracer(on_move=lasting).install()
    try:
        with Tracer(on_move=passing).tracing():
            assert moves == [*before, lasting, passing]
            for notify in moves[len(before) :]:
                notify()
        assert moves == [*before, lasting] and met == ["lasting", "passing"]
    finally:
        moves.remove(lasting)
    assert moves == before
