"""Comparison of two recordings of a step: with layouts that each op chose alone, and with layouts
that were chosen jointly.

The program that sends less is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mirrored.every_rank import from_first, gathered

from ...spec.bytes_text import bytes_text
from ...spec.nested import each_in
from ..agree import fit_together, sent
from ..program import Place, Program
from ..recording import Around, Recorded
from .chain import Chain, Solution
from .choose import chosen
from .follow import Follower
from .listen import Listener


class Listening(Around):
    """Hooks around a recording that note its ops on global tensors, for the layout search."""

    def __init__(self) -> None:
        self._listener = Listener()

    def inside(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context manager that notes the ops of the step that run inside it."""
        return self._listener.listening(is_paused)

    def ended(self, kept: Any) -> None:
        """Fix the layouts of the tensors ``kept``, which the step returns or stores.

        Code outside the step sees these layouts, so the search must not change them.
        """
        self._listener.pin(kept)

    @property
    def chain(self) -> Chain:
        """The recorded ops, as the input of the search."""
        return self._listener.chain


class Following(Around):
    """Hooks around a recording that give its ops the chosen layouts."""

    def __init__(self, solution: Solution) -> None:
        self.follower = Follower(solution)

    @contextmanager
    def inside(self, is_paused: Callable[[], bool]) -> Iterator[None]:
        """Apply the layouts to the ops of the step inside the block."""
        with self.follower.following():
            yield


class Trial:
    """The search for better layouts (``layouts="auto"``), from the first recording to the second.

    ``pending`` has, by the number of a recorded program, the layouts to be tried in its next call.
    """

    def __init__(self) -> None:
        self.pending: dict[int, Solution] = {}

    def choose(self, number: int, program: Program, chain: Chain) -> None:
        """Let rank 0 choose layouts for a recorded program, to be tried in the next call.

        If ranks have recorded different ops, or no choice is better, a note of the program says so.
        This is a collective of the world.
        """
        every = gathered(chain.text)
        if len(set(every)) > 1:
            found: Solution | str = "ranks have recorded different ops"
        else:
            found = from_first("compile: layouts are chosen by rank 0", lambda: chosen(chain))
        if isinstance(found, str):
            program.notes.append(f"layouts: op by op, for {found}")
        else:
            self.pending[number] = found

    def better(self, number: int, alone: Recorded, made: Any, around: Following) -> Recorded:
        """Return the recording that sends less, the same choice on all ranks.

        Args:
            number: number of the program for which layouts were chosen.
            alone: the recording in which each op chose its layouts by itself.
            made: the recording with the chosen layouts.
            around: the hooks of the recording ``made``, which tell whether all its ops took the
                chosen layouts.
        """
        solution = self.pending.pop(number)
        other = made.program if isinstance(made, Recorded) else None
        assert alone.program is not None
        # Results and places must keep their layouts, since code outside the step sees them.
        followed = around.follower.is_followed and _ends(other) == _ends(alone.program)
        mine = sent(other), followed, alone.program.bytes, other.bytes if other else 0
        every = gathered(mine)
        before, after = sum(one[2] for one in every), sum(one[3] for one in every)
        if not all(one[1] for one in every) or not fit_together([one[0] for one in every]):
            alone.program.notes.append("layouts: op by op, for ops differ if others are chosen")
            return alone
        text = f"sent by all ranks: {bytes_text(before)} op by op, {bytes_text(after)} together"
        if after >= before:
            alone.program.notes.append(f"layouts: op by op ({text})")
            return alone
        assert other is not None
        count = len(solution.decisions)
        other.notes.append(f"layouts: of {count} ops chosen together ({text})")
        return made


def _ends(program: Program | None) -> list[Any]:
    """Return the specs, as text, of the tensors that a program returns or assigns.

    Code outside the step sees them, so two programs may replace each other only if they are equal.
    """
    if program is None:
        return [None]
    places = each_in(program.result, Place)
    places += [w.value for part in program.segments for w in part.writes if w.value is not None]
    return [str(place.spec) for place in places]
