"""A step that is recorded twice, op by op and with layouts chosen together: the program that sends
less is run."""

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
from .follow import Follower
from .listen import Listener

# chain -> what its ops are to do, or why they do what they do alone.
Chooser = Callable[[Chain], "Solution | str"]
_chooser: Chooser | None = None


def use_chooser(chooser: Chooser) -> None:
    """From now on ``chooser`` chooses layouts."""
    global _chooser
    _chooser = chooser


class Listening(Around):
    """Notes the global ops of a recording."""

    def __init__(self) -> None:
        self._listener = Listener()

    def inside(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Around the step."""
        return self._listener.listening(is_paused)

    def ended(self, kept: Any) -> None:
        """The step returns or keeps ``kept``, whose layouts stay."""
        self._listener.pin(kept)

    @property
    def chain(self) -> Chain:
        """What was noted."""
        return self._listener.chain


class Following(Around):
    """Gives the ops of a recording their layouts."""

    def __init__(self, solution: Solution) -> None:
        self.follower = Follower(solution)

    @contextmanager
    def inside(self, is_paused: Callable[[], bool]) -> Iterator[None]:
        """Around the step."""
        with self.follower.following():
            yield


class Trial:
    """The choices that are still to be tried, by the number of the program that they are for."""

    def __init__(self) -> None:
        self.pending: dict[int, Solution] = {}

    def choose(self, number: int, program: Program, chain: Chain) -> None:
        """Let the first rank choose layouts for what all ranks have recorded alike."""
        every = gathered(chain.text)
        if len(set(every)) > 1:
            found: Solution | str = "ranks have recorded different ops"
        else:
            chooser = _chooser
            assert chooser is not None
            found = from_first("compile: layouts are chosen by rank 0", lambda: chooser(chain))
        if isinstance(found, str):
            program.notes.append(f"layouts: op by op, for {found}")
        else:
            self.pending[number] = found

    def better(self, number: int, alone: Recorded, made: Any, around: Following) -> Recorded:
        """Choose the recording of a step that sends less. All ranks choose the same."""
        solution = self.pending.pop(number)
        other = made.program if isinstance(made, Recorded) else None
        assert alone.program is not None
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
    """The layouts of what a program gives back and puts into places."""
    if program is None:
        return [None]
    places = each_in(program.result, Place)
    places += [w.value for part in program.segments for w in part.writes if w.value is not None]
    return [str(place.spec) for place in places]
