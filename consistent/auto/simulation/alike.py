"""Detection of equal pipeline stages, so that only one stage of each kind is simulated.

The events of the simulated stage are repeated for the other stages, on their own ranks. Two stages
are equal if their first forward did the same ops on the same shapes, sent the same messages and
kept the same memory, and if their parameters have the same shapes, layouts and gradients. So the
time of a simulation grows with the number of different stages only.

A caller that knows the contents of stages may pass a kind for each stage
(``Simulation.stage_kinds``). Then, of the stages of one kind whose parameters and inputs are equal
as well, only the first is simulated, and the others need not even run their first forward.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ...dispatch.plans.gradients import raw_grad, set_raw_grad, settled_spec
from ...dispatch.plans.shards import attach, is_global
from ...graph.program import StagesProgram, refs
from ...pipeline.part import ProgramPart
from ...spec import Placement, TensorSpec
from ...spec.nested import tensors_in
from ..machines.op_signature import tensors_of
from .log import MemoryEvent, Message, SimulatedOp

Place = tuple[int, int]  # (stage, position among its ranks)


@dataclass
class ActionEvents:
    """Events of one action of a pipeline stage, such as the forward of one micro-batch.

    Args:
        events: the events in order.
        sent: other stage -> (bytes sent to it, the two ranks of the message).
        received: bytes that other stages send to this stage for the action, before it begins.
    """

    events: list[Any] = field(default_factory=list)
    sent: dict[int, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    received: int = 0


class EqualStages:
    """Table of the pipeline stages that equal an earlier, simulated stage.

    ``earlier_stage`` maps such a stage to the earlier one, whose events are copied for it.

    Args:
        placements: placement of each stage.
    """

    def __init__(self, placements: Sequence[Placement]) -> None:
        self._ranks = [p.ranks.ravel().tolist() for p in placements]
        self._places: dict[int, Place] = {}
        for stage, ranks in enumerate(self._ranks):
            for position, rank in enumerate(ranks):
                self._places.setdefault(rank, (stage, position))
        self._has_own_placements = len(set(placements)) == len(placements)
        self._first_of_kind: dict[Hashable, int] = {}
        self.earlier_stage: dict[int, int] = {}
        """Stage -> an earlier equal stage; has no entry for a stage without one."""

    def record_equal_by_kind(
        self, stage: int, kind: Hashable, program: StagesProgram, lines: ProgramPart
    ) -> None:
        """Record an earlier stage that equals ``stage``, if any, before its forward runs.

        This is called if the caller of the simulation gave a kind for each stage.

        Args:
            kind: kind of the stage; stages of equal kinds consist of the same units.
            program: the recorded program of all stages.
            lines: the part of ``program`` that the stage runs.
        """
        specs = tuple(_spec_key(program.spec(move.out)) for move in lines.entering)
        op_names = tuple("" if line.is_module else line.name for line in lines.lines)
        self._record_if_equal(stage, program, lines, (kind, specs, op_names))

    def record_equal_by_events(
        self, stage: int, program: StagesProgram, lines: ProgramPart, forward: ActionEvents
    ) -> None:
        """Record an earlier stage whose first forward had the same events as that of ``stage``.

        Args:
            program: the recorded program of all stages.
            lines: the part of ``program`` that the stage runs.
            forward: events of the first forward of ``stage``, which has run.
        """
        events = tuple(self._event_key(e, stage) for e in forward.events)
        self._record_if_equal(stage, program, lines, events)

    def _record_if_equal(
        self, stage: int, program: StagesProgram, lines: ProgramPart, forward_key: Hashable
    ) -> None:
        # A stage with losses or results equals no other. ``events_for_stage`` also needs stages on
        # different placements, and transfers only from a stage to the next.
        is_unique = lines.losses or lines.results or not self._has_own_placements
        if is_unique or any(move.dst - move.src != 1 for move in program.moves):
            return
        params = tuple(map(_param_key, params_of(program, lines)))
        kind = forward_key, params, len(lines.entering), len(lines.leaving)
        first = self._first_of_kind.setdefault(kind, stage)
        if first != stage:
            self.earlier_stage[stage] = first

    def _event_key(self, event: Any, stage: int) -> Hashable:
        if isinstance(event, SimulatedOp):
            key = event.work.key
            # Without arguments that are not tensors: among them is the counter of a random op.
            return key.op, tuple(tensors_of(key)), key.out
        if isinstance(event, Message):
            ranks = tuple(self._relative_place(rank, stage) for rank in event.ranks)
            return event.name, event.bytes, ranks, bool(event.start), bool(event.wait)
        if isinstance(event, MemoryEvent):
            return event.bytes, event.message
        return None

    def _relative_place(self, rank: int, stage: int) -> Place:
        """Return where a rank is relative to ``stage``: (distance in stages, index in its stage).

        Example: with two ranks a stage, rank 5 relative to stage 1 gives (1, 1).
        """
        rank_stage, position = self._places[rank]
        return rank_stage - stage, position

    def events_for_stage(self, part: ActionEvents, first: int, stage: int) -> ActionEvents:
        """Return a copy of the events ``part`` of stage ``first`` for the equal stage ``stage``.

        The ranks in them are replaced by the corresponding ranks of ``stage`` and its neighbours.
        """

        def moved_rank(old: int) -> int:
            offset, position = self._relative_place(old, first)
            return self._ranks[stage + offset][position]

        def moved_event(e: Any) -> Any:
            if isinstance(e, Message):
                return replace(e, rank=moved_rank(e.rank), ranks=tuple(map(moved_rank, e.ranks)))
            return (
                replace(e, rank=moved_rank(e.rank))
                if isinstance(e, SimulatedOp | MemoryEvent)
                else e
            )

        sent = {
            to + stage - first: (nbytes, (moved_rank(ranks[0]), moved_rank(ranks[1])))
            for to, (nbytes, ranks) in part.sent.items()
        }
        return ActionEvents([moved_event(e) for e in part.events], sent, part.received)


def params_of(program: StagesProgram, lines: ProgramPart) -> list[Any]:
    """Return the trainable global parameters that a stage computes with, each once.

    ``lines`` is the stage's part of ``program``.
    """
    params: dict[int, Any] = {}
    for x in tensors_read_by(program, lines):
        if is_global(x) and x.is_leaf and x.requires_grad:
            params[id(x)] = x
    return list(params.values())


def tensors_read_by(program: StagesProgram, lines: ProgramPart) -> Iterator[Any]:
    """Yield the parameters, buffers and other tensors of the program that a stage reads.

    ``lines`` is the stage's part of ``program``.
    """
    for line in lines.lines:
        if line.is_module:
            yield from line.target.parameters()  # type: ignore[attr-defined]
            yield from line.target.buffers()  # type: ignore[attr-defined]
        for index in refs((line.args, line.kwargs)):
            if (read := program.values[index].read) is not None:
                yield from tensors_in(read())


def _spec_key(spec: TensorSpec) -> Hashable:
    return spec.shape, spec.dtype, spec.sbp, spec.placement.shape


def _param_key(p: Any) -> Hashable:
    attributes = tuple(sorted((k, v) for k, v in vars(p).items() if isinstance(v, str)))
    return p._spec.shape, p._spec.dtype, p._spec.sbp, attributes, raw_grad(p) is None


def give_gradients(like: Sequence[Any], params: Sequence[Any], empty: Any) -> None:
    """Give gradients to the parameters of a stage that is not simulated, and so runs no backward.

    Args:
        like: parameters of the equal, simulated stage, in the same order; a parameter gets a
            gradient if its counterpart here has one.
        params: parameters of the stage.
        empty: function of (shape, dtype) that makes a tensor without values.
    """
    for first, p in zip(like, params, strict=True):
        if raw_grad(first) is not None and raw_grad(p) is None:
            spec = settled_spec(p)
            local = empty(spec.local_shape((0,) * spec.placement.ndim), spec.dtype)
            set_raw_grad(p, attach(local, spec))
