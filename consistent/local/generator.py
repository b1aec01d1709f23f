"""State of the random numbers of global tensors: a seed and a count of the random ops so far.

Numbers are drawn by Philox from (seed, op counter, logical element index), so they depend on the
program and the seed but not on placement or SBP. ``torch.manual_seed`` seeds;
``torch.get_rng_state``, ``set_rng_state`` and ``fork_rng`` carry this state along with torch's own,
so activation checkpointing repeats the same masks. Every rank must seed alike; check mode verifies
it. A program that never seeds draws from a fixed seed: torch's own default differs from process to
process, and asking the other ranks would be a hidden collective.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import NamedTuple

import torch

from mirrored import comm

from ..boxing import check

# torch's long-standing default seed.
DEFAULT_SEED = 67280421310721


class RngState(NamedTuple):
    """What to put back to draw the same numbers again."""

    seed: int
    counter: int


@dataclass(slots=True)
class _Generator:
    seed: int | None = None
    counter: int = 0


_generator = _Generator()
_thread = threading.local()


def _own() -> _Generator:
    return getattr(_thread, "separate", _generator)


@contextmanager
def separate(state: RngState) -> Iterator[None]:
    """Inside, this thread has a state of its own, as simulated ranks in one process need."""
    before = _own()
    _thread.separate = _Generator(*state)
    try:
        yield
    finally:
        _thread.separate = before


def manual_seed(seed: int) -> None:
    """Start over from ``seed``; ``torch.manual_seed`` calls this."""
    own = _own()
    own.seed, own.counter = int(seed) & 0xFFFF_FFFF_FFFF_FFFF, 0


def get_state() -> RngState:
    """The present state."""
    own = _own()
    if own.seed is None:
        # Seeds that people choose are small; the ones that torch draws for itself have 64 random
        # bits.
        seeded_before_import = torch.initial_seed() < 1 << 32
        manual_seed(torch.initial_seed() if seeded_before_import else DEFAULT_SEED)
    assert own.seed is not None
    return RngState(own.seed, own.counter)


def set_state(state: RngState) -> None:
    """Return to a state that ``get_state`` gave."""
    own = _own()
    own.seed, own.counter = state


def next_key() -> RngState:
    """(seed, counter) for one random op; the counter moves on, on every rank alike."""
    state = get_state()
    if check.enabled:
        _check_alike(state)
    _own().counter += 1
    return state


def _check_alike(state: RngState) -> None:
    transport = comm.current()
    states = transport.gather_objects(tuple(state), tuple(range(transport.size)))
    if len(set(states)) > 1:
        drawn = ", ".join(f"rank {r}: seed {s}, op {c}" for r, (s, c) in enumerate(states))
        raise RuntimeError(
            f"check mode: ranks are about to draw different random numbers ({drawn}), so a "
            "broadcast tensor would differ "
            "between them. Call torch.manual_seed with one seed on every rank, at the same point "
            "of the program."
        )
