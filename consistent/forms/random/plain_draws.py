"""Random numbers of plain tensors in code that every rank runs on replicated values.

A user's ``autograd.Function`` is such code: its results count as B (replicated), so the numbers
must be the same on all ranks. Torch's generators may be at any position, because a rank may have
drawn plain numbers of its own before. So the code draws from a temporary stream that begins from
the key of a random op of global tensors, and each generator gets its own state back afterwards. The
seed and the count of global random ops stay unchanged, and ops on global tensors inside the code
draw as they do everywhere.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch

from ...movement.world import device_of
from ...spec import Placement
from . import generator
from .generator import RngState

_MASK_64 = (1 << 64) - 1


@contextmanager
def same_draws(what: str, placement: Placement, key: RngState, salt: int) -> Iterator[None]:
    """Make torch's generators draw the same numbers on all ranks inside the block.

    They draw from a temporary stream, which ``key`` and ``salt`` determine, and get their own
    states back at the end.

    Args:
        what: name of the code in the block. The first few times that it draws, ranks compare keys.
        placement: the ranks that run the code.
        key: the key of a random op of global tensors.
        salt: number that separates streams of the same key.

    Raises:
        RuntimeError: ranks have drawn by different keys.
    """
    if generator.has_separate_state():  # simulated ranks share torch's generators
        yield
        return
    borrowed = [
        _BorrowedGenerator(rng, _mix_seed(key, salt)) for rng in _generators(device_of(placement))
    ]
    try:
        yield
    finally:
        drawn = [each.restore() for each in borrowed]
    if any(drawn):
        generator.compare(what, placement, key.text)


class _BorrowedGenerator:
    """One of torch's generators while it draws from a temporary stream.

    ``rng`` is the generator, ``seed`` that of the stream. Holds the state of ``rng`` to restore.
    """

    def __init__(self, rng: torch.Generator, seed: int) -> None:
        self._generator, self._seed, self._saved_state = rng, rng.initial_seed(), rng.get_state()
        state = _scratch_generator(rng.device).manual_seed(seed).get_state()
        if rng.device.type == "cpu":
            # Keep the seed, from which global random ops draw.
            _words(state)[0] = _words(self._saved_state)[0]
            generator.store_draw_count(state, generator.draw_count(rng))
        self._start_position = _position(state)
        rng.set_state(state)
        if rng.device.type != "cpu":
            self._seed = rng.initial_seed()

    def restore(self) -> bool:
        """Restore the generator's state; return whether the code inside has drawn from it.

        If that code has seeded the generator, the state is left as it is, and the answer is True.
        """
        if self._generator.initial_seed() != self._seed:
            return True
        drawn = _position(self._generator.get_state()) != self._start_position
        if self._generator.device.type == "cpu":
            # The code inside may have run global random ops, so the count moves on.
            generator.store_draw_count(self._saved_state, 0)
            generator.store_draw_count(self._saved_state, generator.draw_count(self._generator))
        self._generator.set_state(self._saved_state)
        return drawn


def _generators(device: torch.device) -> list[torch.Generator]:
    """Return torch's default generators for the CPU and for ``device``.

    Ops on plain tensors draw from these.
    """
    if device.type != "cuda" or not torch.cuda.is_initialized():
        return [torch.default_generator]
    index = torch.cuda.current_device() if device.index is None else device.index
    return [torch.default_generator, torch.cuda.default_generators[index]]


@cache
def _scratch_generator(device: torch.device) -> torch.Generator:
    return torch.Generator(device)


def _words(state: torch.Tensor) -> ctypes.Array:
    """Return a view of the first words of a generator's state.

    The memory is accessed without torch, so that no mode sees the access.
    """
    return (ctypes.c_uint64 * 3).from_address(state.data_ptr())


def _position(state: torch.Tensor) -> bytes:
    """Return a generator's position in its stream as bytes, to see whether it has drawn.

    It is the state without the count of global random ops, which is stored in the two words after
    the first three.
    """
    address, size = state.data_ptr(), state.numel()
    if size <= 40:
        return ctypes.string_at(address, size)
    return ctypes.string_at(address, 24) + ctypes.string_at(address + 40, size - 40)


def _mix_seed(key: RngState, salt: int) -> int:
    """Mix seed, counter and salt into one seed, by the finaliser of SplitMix64."""
    mixed = 0
    for value in (key.seed, key.counter, salt):
        mixed = (mixed + value + 0x9E3779B97F4A7C15) & _MASK_64
        mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & _MASK_64
        mixed = (mixed ^ mixed >> 27) * 0x94D049BB133111EB & _MASK_64
        mixed ^= mixed >> 31
    return mixed
