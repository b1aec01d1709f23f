"""Comparison of two recordings of a step: with layouts that each op chose alone, and with layouts
that were chosen jointly.

The program that sends less is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

from mirrored.every_rank import from_rank_0, gather_from_ranks

from ...spec.bytes_text import bytes_text
from ...spec.nested import instances_in
from ..agree import message_signatures, messages_match
from ..program import Place, Program
from ..recording import Recorded, RecordingHooks
from .chain import Chain, Solution
from .choose import choose_layouts
from .follow import Follower
from .listen import Listener


class ListeningHooks(RecordingHooks):
    """Hooks around a recording that note its ops on global tensors, for the layout search."""

    def __init__(self) -> None:
        self._listener = Listener()

    def context(self, is_paused: Callable[[], bool]) -> AbstractContextManager[None]:
        """Return a context manager that notes the ops of the step that run inside it."""
        return self._listener.listening(is_paused)

    def on_end(self, tensors: Any) -> None:
        """Fix the layouts of the ``tensors``, which the step returns or stores.

        Code outside the step sees these layouts, so the search must not change them.
        """
        self._listener.pin(tensors)

    @property
    def chain(self) -> Chain:
        """The recorded ops, as the input of the search."""
        return self._listener.chain


class FollowingHooks(RecordingHooks):
    """Hooks around a recording that give its ops the chosen layouts."""

    def __init__(self, solution: Solution) -> None:
        self.follower = Follower(solution)

    @contextmanager
    def context(self, is_paused: Callable[[], bool]) -> Iterator[None]:
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
        texts = gather_from_ranks(chain.text)
        if len(set(texts)) > 1:
            outcome: Solution | str = "ranks have recorded different ops"
        else:
            outcome = from_rank_0(
                "compile: layouts are chosen by rank 0", lambda: choose_layouts(chain)
            )
        if isinstance(outcome, str):
            program.notes.append(f"layouts: op by op, for {outcome}")
        else:
            self.pending[number] = outcome

    def better(self, number: int, alone: Recorded, joint: Any, hooks: FollowingHooks) -> Recorded:
        """Return the recording that sends less, the same choice on all ranks.

        Args:
            number: number of the program for which layouts were chosen.
            alone: the recording in which each op chose its layouts by itself.
            joint: the recording with the chosen layouts.
            hooks: the hooks of the recording ``joint``, which tell whether all its ops took the
                chosen layouts.
        """
        solution = self.pending.pop(number)
        joint_program = joint.program if isinstance(joint, Recorded) else None
        assert alone.program is not None
        # Results and places must keep their layouts, since code outside the step sees them.
        is_followed = hooks.follower.is_followed and _result_specs(joint_program) == _result_specs(
            alone.program
        )
        own_report = (
            message_signatures(joint_program),
            is_followed,
            alone.program.bytes,
            joint_program.bytes if joint_program else 0,
        )
        reports = gather_from_ranks(own_report)
        before, after = sum(report[2] for report in reports), sum(report[3] for report in reports)
        if not all(report[1] for report in reports) or not messages_match(
            [report[0] for report in reports]
        ):
            alone.program.notes.append("layouts: op by op, for ops differ if others are chosen")
            return alone
        text = f"sent by all ranks: {bytes_text(before)} op by op, {bytes_text(after)} together"
        if after >= before:
            alone.program.notes.append(f"layouts: op by op ({text})")
            return alone
        assert joint_program is not None
        count = len(solution.decisions)
        joint_program.notes.append(f"layouts: of {count} ops chosen together ({text})")
        return joint


def _result_specs(program: Program | None) -> list[Any]:
    """Return the specs, as text, of the tensors that a program returns or assigns.

    Code outside the step sees them, so two programs may replace each other only if they are equal.
    """
    if program is None:
        return [None]
    places = instances_in(program.result, Place)
    places += [w.value for part in program.segments for w in part.writes if w.value is not None]
    return [str(place.spec) for place in places]
