"""State of the random numbers of global tensors: a seed and a count of the random ops so far.

Numbers are drawn by Philox from (seed, count, logical element index), so they depend on the program
and the seed but not on placement or SBP.

The seed is that of torch's default CPU generator, and the count belongs to that generator. It
travels in the generator's state, in bits that torch leaves empty (a state holds each 32-bit word of
the Mersenne twister in 64 bits), so that whatever seeds, saves, clones or restores torch's
generator does so with this state, too: ``torch.manual_seed``, ``get_rng_state``, ``fork_rng``,
``torch.save`` of a state, activation checkpointing. Torch's own numbers are not touched by it, nor
the count by them: a rank that draws plain numbers of its own still draws the same global ones.

Every rank must seed alike. A rank with another seed would draw other numbers: the pieces of a split
tensor would be random all the same, but a broadcast tensor would differ between ranks. So ranks
compare seed and count the first times that an op of some name draws, and in check mode each time. A
program that never seeds draws from a fixed seed, since torch's own default differs from process to
process.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import agree, by_rank
from mirrored.transports.base.unseen import unseen

from ...movement import check_mode, plain_values
from ...spec import Placement

# torch's long-standing default seed.
DEFAULT_SEED = 67280421310721
# Seeds that people choose are small; the ones that torch draws for itself have 53 random bits.
_UNSEEDED = torch.initial_seed() if torch.initial_seed() >= 1 << 32 else None

# Byte offset of the first words in a state of the Mersenne twister; each has 32 bits to spare.
_FIRST_WORD = 24
_HALF = 31  # bits of the count in one word; the sign stays free
_STATE_BYTES = 5000  # the least that a state of a CPU generator has


class RngState(NamedTuple):
    """The state that has to be restored to draw the same numbers again."""

    seed: int
    counter: int

    def words(self) -> str:
        """The state in words, for messages."""
        return f"seed {self.seed}, random op {self.counter}"


def _empty() -> MutableMapping[torch.Generator, int]:
    """Generators -> numbers. Before torch 2.13 nothing can refer weakly to a generator, so one that
    has a count stays alive."""
    try:
        weakref.ref(torch.default_generator)
    except TypeError:
        return {}
    return weakref.WeakKeyDictionary()


_counts = _empty()
_thread = threading.local()


def count(of: torch.Generator) -> int:
    """How many random ops of global tensors drew from ``of`` since it was seeded."""
    return _counts.get(of, 0)


def set_count(of: torch.Generator, value: int) -> None:
    """Record that ``value`` random ops have drawn from ``of``."""
    if value:
        _counts[of] = value
    else:
        _counts.pop(of, None)


def with_count(state: torch.Tensor, value: int) -> torch.Tensor:
    """``state``, as torch gave it out, with the count in it."""
    if value:
        words = _words(state)
        words[1], words[3] = value & ((1 << _HALF) - 1), value >> _HALF
    return state


def count_in(state: torch.Tensor) -> int:
    """The count in a state; 0 in one of a program that had none."""
    if state.numel() < _STATE_BYTES or state.dtype is not torch.uint8:
        return 0  # the state of a device's generator
    words = _words(state)
    return words[1] + (words[3] << _HALF)


def _words(state: torch.Tensor) -> Any:
    """The first two words, as four int32: every other one is spare. They are accessed without
    torch, so that no mode or profiler sees it."""
    return (ctypes.c_int32 * 4).from_address(state.data_ptr() + _FIRST_WORD)


@contextmanager
def separate(state: RngState) -> Iterator[None]:
    """Inside, this thread has a state of its own, as simulated ranks in one process need."""
    before = getattr(_thread, "separate", None)
    _thread.separate = state
    try:
        yield
    finally:
        _thread.separate = before


def get_state() -> RngState:
    """The present state."""
    own = getattr(_thread, "separate", None)
    if own is not None:
        return own
    seed = torch.initial_seed()
    return RngState(
        DEFAULT_SEED if seed == _UNSEEDED else seed & 0xFFFF_FFFF_FFFF_FFFF,
        count(torch.default_generator),
    )


def next_key(what: str, placement: Placement | None) -> RngState:
    """(seed, counter) for one random op; the counter advances by one on every rank. The first times
    that ``what`` draws on ``placement``, its ranks compare them; None: nothing is drawn."""
    state = get_state()
    if check_mode.enabled:
        _check_alike(state)
    else:
        compare(what, placement, state.words)
    advance_to(state.counter + 1)
    return state


def is_separate() -> bool:
    """Whether this thread has a state of its own."""
    return getattr(_thread, "separate", None) is not None


def advance_to(counter: int) -> None:
    """The next random op is the one of this number."""
    if is_separate():
        _thread.separate = RngState(_thread.separate.seed, counter)
    else:
        set_count(torch.default_generator, counter)


def compare(what: str, placement: Placement | None, drawn_from: Callable[[], str]) -> None:
    """The first times that ``what`` draws on ``placement``, raise on all its ranks if they draw
    from other states; one small collective.

    Raises:
        RuntimeError: names the state of each rank.
    """
    if placement is not None:
        plain_values.first_times(
            placement, (what, "draws"), lambda: _check_drawn(what, placement, drawn_from())
        )


def _check_drawn(what: str, placement: Placement, mine: str) -> None:
    ranks = tuple(placement.ranks.ravel().tolist())

    def differ(states: list[str]) -> RuntimeError:
        return RuntimeError(
            f"{what}: the ranks are about to draw other random numbers for one global tensor.\n"
            f"  at {check_mode.call_site()}:\n"
            + by_rank(states, ranks)
            + "\n  Seed alike on every rank, at the same point of the program: "
            "torch.manual_seed(seed), not seed + rank. Each element of a global tensor has a "
            "number of its own on whichever rank it lies, so parts of a batch are never drawn "
            "alike.\n"
            "  For plain numbers of a rank's own: generator=torch.Generator().manual_seed(seed + "
            "rank).\n"
            "  To draw each rank's own for global tensors too: with consistent.plain_may_differ()."
        )

    with unseen():
        agree(mine, differ, ranks=ranks)


def _check_alike(state: RngState) -> None:
    def differ(states: list[tuple[int, ...]]) -> RuntimeError:
        drawn = ", ".join(f"rank {r}: seed {s}, op {c}" for r, (s, c) in enumerate(states))
        return RuntimeError(
            f"check mode: ranks are about to draw different random numbers ({drawn}), so a "
            "broadcast tensor would differ "
            "between them. Call torch.manual_seed with one seed on every rank, at the same point "
            "of the program."
        )

    agree(tuple(state), differ)
