"""A signal to one rank is seen by all at the same step, and saving there is no deadlock."""

from __future__ import annotations

import signal
import tempfile
from typing import Any

import pytest
import torch

import consistent
from consistent import Placement, S
from consistent.checkpoint import on_signal
from tests.ranks import pool

STEPS = 6


def train(rank: int, at: dict[int, int], folder: str) -> list[int]:
    """The steps at which all save; rank r gets a signal at step `at[r]`, in the middle of it."""
    x = consistent.distribute(torch.arange(6.0), Placement("cpu", [0, 1, 2]), S(0))
    due, saved = on_signal(signal.SIGUSR2, signal.SIGTERM), list[int]()
    for step in range(STEPS):
        if at.get(rank) == step:
            signal.raise_signal(signal.SIGTERM if rank else signal.SIGUSR2)
        x = x + x.sum() * 0
        if due():
            consistent.checkpoint.save(folder, x=x, step=step)
            saved.append(step)
    due.close()
    assert consistent.checkpoint.load(folder)["step"] == saved[-1]
    return saved


@pytest.mark.parametrize(
    ("at", "saved"), [({1: 2}, [2]), ({0: 1, 2: 4}, [1, 4]), ({0: 3, 1: 3, 2: 3}, [3])]
)
def test_all_ranks_save_at_the_same_step(at: dict[int, int], saved: list[int]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        assert pool(3).run(train, at, folder) == [saved] * 3


def test_the_handler_of_before_is_called_and_comes_back() -> None:
    got: list[Any] = []

    def mine(number: int, frame: Any) -> None:
        got.append(number)

    first = signal.signal(signal.SIGUSR2, mine)
    due = on_signal(signal.SIGUSR2)
    assert not due()
    signal.raise_signal(signal.SIGUSR2)
    assert due() and not due() and got == [signal.SIGUSR2]
    due.close()
    assert signal.getsignal(signal.SIGUSR2) is mine
    signal.signal(signal.SIGUSR2, first)
