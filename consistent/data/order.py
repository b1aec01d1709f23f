"""Save and restore the random states from which the order of an epoch is drawn."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader


class Order:
    """The random generators that draw the order of items, with their states at the epoch's start.

    These are the generators that were passed to the DataLoader and its samplers, and torch's
    default generator, from which they draw if none was passed. From the states a resumed program
    draws the same order again.
    """

    def __init__(self, loader: DataLoader) -> None:
        self._passed_generators = _generators(loader)
        self._start_states: list[Tensor] = self._current_states()

    def state(self, began: bool) -> list[Tensor]:
        """Return the generators' states as uint8 tensors, the default generator's first.

        With ``began``, in the middle of an epoch, they are the states at its start, from which its
        order was drawn. Otherwise, between two epochs, they are the present ones.
        """
        return [each.clone() for each in self._start_states] if began else self._current_states()

    def load(self, states: list[Tensor], began: bool) -> None:
        """Restore the states that ``state`` returned for the same ``began``.

        With ``began`` they are only kept, for ``drawing(resumed=True)``. Otherwise the generators
        get them at once, except torch's default generator: the program draws from it as well, and
        restores it itself.
        """
        if len(states) != 1 + len(self._passed_generators):
            raise ValueError(
                f"data.loader: the saved position has the states of {len(states) - 1} generators, "
                f"and this DataLoader and its samplers have {len(self._passed_generators)}. Make "
                "them with generators as they were when it was saved."
            )
        self._start_states = [each.cpu().to(torch.uint8) for each in states]
        if not began:
            for generator, state in zip(self._passed_generators, self._start_states[1:]):
                generator.set_state(state)

    @contextmanager
    def drawing(self, resumed: bool) -> Iterator[None]:
        """Context manager around the start of an epoch, in which its order is drawn.

        With ``resumed``, in a resumed epoch, the order is drawn from the states that the generators
        had at its start. Then the default generator gets its present state back, because the
        program draws from it as well.
        """
        if not resumed:
            self._start_states = self._current_states()
            yield
            return
        default_state = torch.get_rng_state()
        for generator, state in zip([None, *self._passed_generators], self._start_states):
            (torch.set_rng_state if generator is None else generator.set_state)(state)
        try:
            yield
        finally:
            torch.set_rng_state(default_state)

    def _current_states(self) -> list[Tensor]:
        return [torch.get_rng_state(), *(each.get_state() for each in self._passed_generators)]


def set_epoch(loader: DataLoader, epoch: int) -> None:
    """Call ``set_epoch(epoch)`` on those samplers of ``loader`` that have this method."""
    for sampler in _samplers(loader):
        if hasattr(sampler, "set_epoch"):
            sampler.set_epoch(epoch)


def _samplers(loader: DataLoader) -> list[Any]:
    batches: Any = loader.batch_sampler
    return [loader.sampler, batches, getattr(batches, "sampler", None)]


def _generators(loader: DataLoader) -> list[torch.Generator]:
    """Return the distinct generators of the loader and its samplers, in a fixed order."""
    generators: list[torch.Generator] = []
    for owner in (loader, *_samplers(loader)):
        generator = getattr(owner, "generator", None)
        if isinstance(generator, torch.Generator) and all(generator is not g for g in generators):
            generators.append(generator)
    return generators
