"""State of the random numbers of global tensors: a seed and a count of the random ops so far.

Numbers are drawn by Philox from (seed, count, logical element index), so they depend on the program
and the seed but not on placement or SBP.

The seed is that of torch's default CPU generator, and the count belongs to that generator. The
count is stored in the generator's state, in bits that torch leaves empty (a state holds each 32-bit
word of the Mersenne twister in 64 bits). Whatever seeds, saves, clones or restores torch's
generator therefore does so with the count, too: ``torch.manual_seed``, ``get_rng_state``,
``fork_rng``, ``torch.save`` of a state, activation checkpointing. Torch's own numbers do not depend
on the count, nor the count on them: a rank that draws plain numbers of its own still draws the same
global numbers.

Every rank must use the same seed. A rank with another seed would draw other numbers: the pieces of
a split tensor would still be random, but a broadcast tensor would differ between ranks. So ranks
compare seed and count the first few times that an op of some name draws, and in check mode each
time. A program that never seeds draws from a fixed seed, since torch's own default differs from
process to process.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from mirrored.every_rank import agree, lines_by_rank
from mirrored.transports.base.unseen import hidden_from_modes

from ...movement import check_mode, plain_values
from ...spec import Placement

# torch's long-standing default seed.
DEFAULT_SEED = 67280421310721
# Seeds that people choose are small. The seeds that torch draws for itself have 53 random bits, so
# a seed of 2^32 or more at import means that nobody has seeded yet.
_UNSEEDED = torch.initial_seed() if torch.initial_seed() >= 1 << 32 else None

# Byte offset of the Mersenne twister's words in a state; each word has 32 unused bits.
_FIRST_WORD = 24
_BITS_PER_WORD = 31  # bits of the count stored in one word; the sign bit is not used
_STATE_BYTES = 5000  # minimum size of a CPU generator's state


class RngState(NamedTuple):
    """Seed and op counter from which a random op of global tensors draws.

    An op that draws from an equal state, with equal shape, draws the same numbers again.
    """

    seed: int
    counter: int

    def text(self) -> str:
        """Return the state as text, for error messages."""
        return f"seed {self.seed}, random op {self.counter}"


def _new_counts() -> MutableMapping[torch.Generator, int]:
    """Return an empty map from generators to their counts of random ops.

    Before torch 2.13 a generator cannot be weakly referenced, so there the map keeps its generators
    alive.
    """
    try:
        weakref.ref(torch.default_generator)
    except TypeError:
        return {}
    return weakref.WeakKeyDictionary()


_counts = _new_counts()
_thread = threading.local()


def draw_count(generator: torch.Generator) -> int:
    """Return how many random ops of global tensors have drawn from ``generator``.

    Counted since the generator was seeded.
    """
    return _counts.get(generator, 0)


def set_draw_count(generator: torch.Generator, value: int) -> None:
    """Set the number of random ops of global tensors that have drawn from ``generator``."""
    if value:
        _counts[generator] = value
    else:
        _counts.pop(generator, None)


def store_draw_count(state: torch.Tensor, value: int) -> torch.Tensor:
    """Write the count ``value`` of random ops into the state of a CPU generator.

    ``state`` is what ``get_state`` returned. It is changed and returned.
    """
    if value:
        words = _words(state)
        words[1], words[3] = value & ((1 << _BITS_PER_WORD) - 1), value >> _BITS_PER_WORD
    return state


def stored_draw_count(state: torch.Tensor) -> int:
    """Return the count of random ops stored in a generator's state; 0 if none was stored."""
    if state.numel() < _STATE_BYTES or state.dtype is not torch.uint8:
        return 0  # the state of a CUDA generator, which holds no count
    words = _words(state)
    return words[1] + (words[3] << _BITS_PER_WORD)


def _words(state: torch.Tensor) -> Any:
    """Return a view of the state's first two words as four int32.

    Torch does not use the second and fourth. The memory is accessed without torch, so that no mode
    or profiler sees the access.
    """
    return (ctypes.c_int32 * 4).from_address(state.data_ptr() + _FIRST_WORD)


@contextmanager
def separate_state(state: RngState) -> Iterator[None]:
    """Give this thread a random state of its own inside the block.

    Simulated ranks, which are threads of one process, need this.
    """
    previous = getattr(_thread, "separate", None)
    _thread.separate = state
    try:
        yield
    finally:
        _thread.separate = previous


def get_state() -> RngState:
    """Return the current seed and op counter of this thread."""
    state = getattr(_thread, "separate", None)
    if state is not None:
        return state
    seed = torch.initial_seed()
    return RngState(
        DEFAULT_SEED if seed == _UNSEEDED else seed & 0xFFFF_FFFF_FFFF_FFFF,
        draw_count(torch.default_generator),
    )


def next_key(what: str, placement: Placement | None) -> RngState:
    """Return the (seed, counter) of one random op, and advance the counter by one.

    Called on every rank for every random op, so that the counters stay equal.

    Args:
        what: name of the op. The first few times that it draws on ``placement``, the ranks compare
            their keys.
        placement: the ranks that draw, or None if nothing is drawn.
    """
    state = get_state()
    if check_mode.enabled:
        _check_equal_keys(state)
    else:
        compare(what, placement, state.text)
    advance_to(state.counter + 1)
    return state


def has_separate_state() -> bool:
    """Return whether this thread has its own random state, as a simulated rank has."""
    return getattr(_thread, "separate", None) is not None


def advance_to(counter: int) -> None:
    """Set the op counter, that is, the number of the next random op, to ``counter``."""
    if has_separate_state():
        _thread.separate = RngState(_thread.separate.seed, counter)
    else:
        set_draw_count(torch.default_generator, counter)


def compare(what: str, placement: Placement | None, drawn_from: Callable[[], str]) -> None:
    """Raise on all ranks of ``placement`` if they are about to draw from different states.

    The first few calls for ``what`` compare, with one small collective each; later calls do not.
    ``drawn_from`` returns this rank's state as text.

    Raises:
        RuntimeError: names the state of each rank.
    """
    if placement is not None:
        plain_values.check_first_times(
            placement, (what, "draws"), lambda: _check_equal_states(what, placement, drawn_from())
        )


def _check_equal_states(op_name: str, placement: Placement, own_state: str) -> None:
    ranks = tuple(placement.ranks.ravel().tolist())

    def differ(states: list[str]) -> RuntimeError:
        return RuntimeError(
            f"{op_name}: the ranks are about to draw other random numbers for one global tensor.\n"
            f"  at {check_mode.call_site()}:\n"
            + lines_by_rank(states, ranks)
            + "\n  Seed alike on every rank, at the same point of the program: "
            "torch.manual_seed(seed), not seed + rank. Each element of a global tensor has a "
            "number of its own on whichever rank it lies, so parts of a batch are never drawn "
            "alike.\n"
            "  For plain numbers of a rank's own: generator=torch.Generator().manual_seed(seed + "
            "rank).\n"
            "  To draw each rank's own for global tensors too: with consistent.plain_may_differ()."
        )

    with hidden_from_modes():
        agree(own_state, differ, ranks=ranks)


def _check_equal_keys(state: RngState) -> None:
    def differ(states: list[tuple[int, ...]]) -> RuntimeError:
        drawn = ", ".join(f"rank {r}: seed {s}, op {c}" for r, (s, c) in enumerate(states))
        return RuntimeError(
            f"check mode: ranks are about to draw different random numbers ({drawn}), so a "
            "broadcast tensor would differ "
            "between them. Call torch.manual_seed with one seed on every rank, at the same point "
            "of the program."
        )

    agree(tuple(state), differ)
