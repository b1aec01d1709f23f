from __future__ import annotations

import pytest

from mirrored.every_rank import from_first, on_every_rank
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
    assert from_first("try", lambda: rank) == 0


@on_ranks(3)
@pytest.mark.parametrize("failing", [(0,), (1, 2), (0, 1, 2)])
def test_an_error_on_some_is_an_error_on_all(rank: int, failing: tuple[int, ...]) -> None:
    with pytest.raises(Kind, match="(?s)try.*no luck") as raised:
        on_every_rank("try", lambda: fails_on(rank, failing, ValueError("no luck")), Kind)
    assert ("on rank" in str(raised.value)) == (len(failing) < 3)


@on_ranks(2)
def test_what_the_first_meets_all_raise(rank: int) -> None:
    with pytest.raises(RuntimeError, match="it failed, so every rank stops.\n.*rank 0: KeyError"):
        from_first("try", lambda: fails_on(rank, (0, 1), KeyError("gone")))


@on_ranks(2)
def test_a_missing_file_stays_one(rank: int) -> None:
    with pytest.raises(FileNotFoundError):
        from_first("read", lambda: open("/nowhere/at all").close())


def test_simulated_ranks() -> None:
    assert simulate(lambda rank: from_first("try", lambda: rank + 5), 3) == [5, 5, 5]
