from __future__ import annotations

import pytest

from mirrored.every_rank import (
    agree,
    all_equal,
    from_rank_0,
    gather_from_ranks,
    lines_by_rank,
    on_every_rank,
)
from tests.ranks import on_ranks, simulate


class Kind(Exception):
    """The error that ranks are to raise."""


def fails_on(rank: int, failing: tuple[int, ...], error: Exception) -> int:
    if rank in failing:
        raise error
    return rank


@on_ranks(3)
def test_every_rank_gets_what_each_made(rank: int) -> None:
    assert on_every_rank("try", lambda: rank) == [0, 1, 2]
    assert from_rank_0("try", lambda: rank) == 0


@on_ranks(3)
@pytest.mark.parametrize("failing", [(0,), (1, 2), (0, 1, 2)])
def test_an_error_on_some_is_an_error_on_all(rank: int, failing: tuple[int, ...]) -> None:
    with pytest.raises(Kind, match="(?s)try.*no luck") as raised:
        on_every_rank("try", lambda: fails_on(rank, failing, ValueError("no luck")), Kind)
    assert ("on rank" in str(raised.value)) == (len(failing) < 3)


@on_ranks(2)
def test_what_the_first_meets_all_raise(rank: int) -> None:
    with pytest.raises(RuntimeError, match="it failed, so every rank stops.\n.*rank 0: KeyError"):
        from_rank_0("try", lambda: fails_on(rank, (0, 1), KeyError("gone")))


@on_ranks(2)
def test_a_missing_file_stays_one(rank: int) -> None:
    with pytest.raises(FileNotFoundError):
        from_rank_0("read", lambda: open("/nowhere/at all").close())


def test_simulated_ranks() -> None:
    assert simulate(lambda rank: from_rank_0("try", lambda: rank + 5), 3) == [5, 5, 5]


def _compared(rank: int, note: object, ranks: tuple[int, ...] | None = None) -> object:
    """What ``agree`` gives or says."""
    try:
        return agree(
            note, lambda notes: Kind("unlike:\n" + lines_by_rank(map(str, notes))), ranks=ranks
        )
    except Kind as error:
        return str(error)


def test_notes_that_differ_raise_on_every_rank_with_all_of_them() -> None:
    assert simulate(lambda rank: _compared(rank, "a"), 3) == [["a"] * 3] * 3
    said = "unlike:\n    rank 0: 0\n    rank 1: 0\n    rank 2: 1"
    assert simulate(lambda rank: _compared(rank, rank // 2), 3) == [said] * 3


def test_some_ranks_agree_without_the_others() -> None:
    def body(rank: int) -> object:
        return _compared(rank, rank, (0, 2)) if rank != 1 else _compared(rank, rank, (1,))

    said = "unlike:\n    rank 0: 0\n    rank 1: 2"
    assert simulate(body, 3) == [said, [1], said]


def test_what_fits_together_need_not_be_equal() -> None:
    def body(rank: int) -> list[int]:
        return agree(rank, lambda notes: Kind(str(notes)), fits=lambda notes: 5 not in notes)

    assert simulate(body, 3) == [[0, 1, 2]] * 3 == simulate(gather_from_ranks, 3)


def test_lines_by_rank() -> None:
    assert lines_by_rank(["x", "y"]) == "    rank 0: x\n    rank 1: y"
    assert lines_by_rank(["x", "y"], (4, 2)) == "    rank 4: x\n    rank 2: y"
    assert all_equal([(1,), (1,)]) and not all_equal([1, 1, 2])
