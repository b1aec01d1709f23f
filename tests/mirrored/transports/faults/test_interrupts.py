"""A program that catches Ctrl-C and goes on gets right values, or an error on every rank."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from typing import Any

import pytest
import torch

import consistent
from consistent import B, S
from consistent.spec.tracer import Tracer
from mirrored.transports.default import current
from tests.mirrored.another_group import another_group
from tests.mirrored.kinds import over_gloo
from tests.ranks import ALL, pool

STEPS = 6
PLACES = ("between", "boxing", "forward", "item", "backward", "optimizer", "compiled")
# (place, the step in which a rank gets the signal): of one rank, or of both at different steps.
SENT = [(place, due) for place in PLACES for due in ({1: 2}, {0: 2, 1: 3})]
_WEIGHTS = [torch.arange(36.0).view(6, 6).add(k).sin().double() for k in range(3)]
_X = torch.arange(24.0).view(4, 6).cos().double()


class _Session:
    """Steps whose losses are known, in which a signal comes at a place."""

    def __init__(self, place: str, due: dict[int, int]) -> None:
        self.place, self.due, self.now = place, due, -1
        self.rank = current().rank
        self.pids = current().gather_objects(os.getpid(), (0, 1))
        self.placement = consistent.placement("cpu", [0, 1])
        step = consistent.compile(self.loss, backend="ops") if place == "compiled" else self.loss
        self.step = step

    def at(self, place: str) -> None:
        """Where the signal comes, if it is due there."""
        if self.place == place and self.due.get(self.rank) == self.now:
            self.now = -1
            signal.raise_signal(signal.SIGINT)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        weights = [consistent.distribute(w, self.placement, S(0)) for w in _WEIGHTS]
        weights = [w.requires_grad_() for w in weights]
        optimizer = torch.optim.SGD(weights, lr=0.1)
        optimizer.register_step_pre_hook(lambda *_: self.at("optimizer"))
        y = x
        for w in weights:
            y = torch.relu(y @ w.to_global(sbp=B))
            self.at("forward")
            if y.requires_grad and self.place == "backward":
                y.register_hook(lambda _: self.at("backward"))
        y.sum().backward()
        optimizer.step()
        return torch.stack([w.abs().sum() for w in weights]).sum()

    def read(self, loss: torch.Tensor) -> float:
        """The number, of which the rank that gets the signal waits for the other one."""
        other = 1 - self.rank
        if self.place == "item" and self.due.get(other) == self.now:
            time.sleep(0.2)
            os.kill(self.pids[other], signal.SIGINT)
        return round(loss.item(), 6)

    def values(self) -> list[Any]:
        """What each step gives, up to one that raises."""
        found: list[Any] = []
        for k in range(STEPS):
            self.now = k
            try:
                self.at("between")
                self.at("compiled")
                x = consistent.distribute(_X * (k + 1), self.placement, S(0))
                found.append(self.read(self.step(x)))
            except KeyboardInterrupt:
                found.append("interrupted")
            except RuntimeError as error:
                return [*found, str(error)]
        return found


def _session(place: str, due: dict[int, int]) -> list[Any]:
    _Session(place, {}).values()  # plans are made, and a program is
    session = _Session(place, due)
    with Tracer(on_boxing_begin=lambda *_: session.at("boxing")).tracing():
        return session.values()


def _at_any_moment(rank: int, seed: int) -> list[Any]:
    """The signal comes at any moment of some steps: to one rank or to both."""
    session, drawn = _Session("nowhere", {}), random.Random(seed)
    session.values()
    start = time.monotonic()
    session.values()
    took, alone = time.monotonic() - start, drawn.random() < 0.5
    delay = drawn.random() * took * 0.7 + (0 if alone else random.random() * took * 0.05)
    sends = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGINT))
    found: list[Any] = []
    with contextlib.suppress(KeyboardInterrupt):  # it may come late
        if rank == seed % 2 or not alone:
            sends.start()
        found = session.values()
        sends.cancel()
        time.sleep(0.01)
    return found


def _sessions(rank: int, sent: list[tuple[str, dict[int, int]]], seeds: range) -> list[Any]:
    """What each session gives, one after the other, each with a process group of its own."""
    found = [_session("nowhere", {})]
    for number, (place, due) in enumerate(sent):
        another_group(rank, f"{place}/{number}")
        found.append(_session(place, due))
    for seed in seeds:
        another_group(rank, f"moment/{seed}")
        found.append(_at_any_moment(rank, seed))
    another_group(rank, "last")
    return [*found, _session("nowhere", {})]


@pytest.mark.parametrize("where", ["gloo", "shared memory"])
def test_no_number_of_another_step_is_taken_after_an_interrupt(where: str) -> None:
    few = where == "gloo" and not ALL  # each waits until the time is up
    sent, seeds = SENT[::5] if few else SENT, 30 if ALL else 1 if few else 2
    pool(2).close()
    try:
        ways = (over_gloo, _sessions) if where == "gloo" else (_sessions,)
        both = pool(2).run(*ways, sent, range(seeds), timeout=900 if ALL else 300)
    finally:
        pool(2).close()
    expected = both[0][0]
    assert both[0][-1] == both[1][-1] == expected and len(set(expected)) == STEPS
    for number, found in enumerate(zip(*(each[1:-1] for each in both), strict=True)):
        name = sent[number] if number < len(sent) else "any moment"
        _judge(name, list(found), expected)


def _judge(name: Any, found: list[list[Any]], expected: list[float]) -> None:
    """Values are those of their steps, and once a rank was interrupted both raise.

    In the last step a signal at any moment may come after all messages, which the other rank has
    then received.
    """
    interrupted = [said.index("interrupted") for said in found if "interrupted" in said]
    late = name == "any moment" and min(interrupted, default=0) == STEPS - 1
    for said in found:
        for k, value in enumerate(said):
            assert isinstance(value, str) or value == expected[k], (name, found)
        if interrupted and not late:
            assert isinstance(said[-1], str), (name, found)
    if name != "any moment":
        assert interrupted, (name, found)
