"""Simulation of a pipeline schedule, from the first and the last micro-batch of each stage.

Only these two micro-batches are run. When the timeline of the schedule is computed, each of the
other micro-batches takes the seconds of the first.

```
F0 of all stages, B0 of all stages      gradients are added up
Fn of all stages, Bn of all stages      gradients are summed over a stage's ranks
```

F0 and B0 are forward and backward of the first micro-batch, Fn and Bn those of the last. Of several
equal stages, only the first is simulated. F0 is simulated for all of them, to find out which are
equal, unless the kinds of stages are known (``alike.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...autograd.leaves import no_sync
from ...dispatch.plans.shards import is_global
from ...graph.program import StageTransfer
from ...movement import between
from ...movement.run import run as box
from ...pipeline.run import ScheduleRun
from ...pipeline.table import Action, Schedule
from ...spec import Placement, TensorSpec
from ...spec.tracer import Tracer
from .alike import ActionEvents, EqualStages, give_gradients, params_of, tensors_read_by
from .imagined import Imagined
from .log import Log, Mark, MemoryEvent, Message, ScheduleEvent
from .transport import SimulatedTransport


@dataclass
class SimulatedSchedule:
    """Pipeline schedule with the recorded events of each kind of action.

    Args:
        table: the schedule, that is, which actions run in which order.
        placements: placement of each stage.
        ranks: for each stage, the one of its ranks that is simulated.
        action_events: (kind of action, stage, whether it is the last micro-batch) -> events of the
            action.
    """

    table: Schedule
    placements: tuple[Placement, ...]
    ranks: tuple[int, ...]
    action_events: dict[tuple[str, int, bool], ActionEvents]

    def events_of(self, action: Action) -> ActionEvents:
        """Return the events of an action of the schedule."""
        last = action.micro_batch == self.table.micro_batches - 1
        return self.action_events[action.kind, action.stage, last]


@contextmanager
def simulate_schedules(
    log: Log,
    transport: SimulatedTransport,
    imagined: Imagined,
    note: Callable[[Any, str], None],
    kinds: Callable[[], Sequence[Hashable]],
) -> Iterator[None]:
    """Simulate each pipeline schedule that runs inside the ``with`` block, and add it to ``log``.

    Args:
        transport, imagined: transport and dispatch mode of the simulation.
        note: function of (tensors, kind), called with the parameters and buffers of all stages.
        kinds: function that returns the kind of each stage, or an empty sequence if kinds are not
            known.
    """

    def simulate_schedule(run: ScheduleRun) -> None:
        followed_run = _FollowedRun(run, log, transport, imagined)
        note(list(followed_run.lasting_tensors()), "parameters")
        followed_run.run_actions(kinds())

    with Tracer(handle_schedule=simulate_schedule).tracing():
        yield


class _FollowedRun(ScheduleRun):
    """Runner of a pipeline schedule that runs only its first and last micro-batch.

    It runs them on all stages, except on stages that equal an earlier one.
    """

    def __init__(
        self, run: ScheduleRun, log: Log, transport: SimulatedTransport, imagined: Imagined
    ) -> None:
        super().__init__(run.table, run.placements, run.batch)
        self._original_run, self._log = run, log
        self._transport, self._imagined = transport, imagined
        self._current_part = ActionEvents()

    def run_actions(self, kinds: Sequence[Hashable] = ()) -> None:
        """Simulate the schedule, and put one ``ScheduleEvent`` in the log in place of its events.

        Of the schedule's own events, only these stay in the log: each ``Mark``, and allocations and
        frees that change what is held afterwards. ``kinds`` is the kind of each stage, or empty.
        """
        begin, parts = len(self._log.events), {}
        last = self.table.micro_batches - 1
        equal_stages = EqualStages(self.placements)
        for stage, kind in enumerate(kinds):
            equal_stages.record_equal_by_kind(
                stage, kind, self.batch[0].program, self._part(Action("F", stage, 0))
            )
        # With a single micro-batch, first and last are the same.
        for m in dict.fromkeys((0, last)):
            for action in self._actions_of(m):
                stage = action.stage
                if stage in equal_stages.earlier_stage and (m or action.kind != "F" or kinds):
                    continue
                parts[action.kind, stage, m == last] = self._record_action(action)
                if action.kind == "F" and m == 0 and not kinds:
                    program, lines = self.batch[0].program, self._part(action)
                    equal_stages.record_equal_by_events(stage, program, lines, self._current_part)
                    if stage in equal_stages.earlier_stage:
                        # Its backward will not run, so what its forward keeps is freed.
                        self._cells.pop((stage, 0), None)
        self._copy_to_equal_stages(equal_stages, parts)
        events = self._log.events[begin:]
        marks = [e for e in events if isinstance(e, Mark)]
        ranks = tuple(self._transport.rank_in(p) for p in self.placements)
        followed = SimulatedSchedule(self.table, tuple(self.placements), ranks, parts)
        self._log.events[begin:] = [*marks, ScheduleEvent(followed), *_lasting_allocations(events)]
        # Micro-batches that were not run get the results of the last one.
        for m, results in enumerate(self._original_run.results):
            results.update(self.results[last] if m else self.results[0])

    def lasting_tensors(self) -> Iterator[Any]:
        """Yield the parameters and buffers of all stages, also of stages that are not simulated."""
        for stage in range(self.table.stages):
            lines = self._part(Action("F", stage, 0))
            yield from filter(is_global, tensors_read_by(self.batch[0].program, lines))

    def _record_action(self, action: Action) -> ActionEvents:
        """Run one action as a rank of its stage, and return its events."""
        start = len(self._log.events)
        self._current_part, self.current_action = ActionEvents(), action
        with self._transport.acting_in(self.placements[action.stage]):
            getattr(self, _METHODS[action.kind])(action)
        self._current_part.events = self._log.events[start:]
        return self._current_part

    def _copy_to_equal_stages(
        self, equal_stages: EqualStages, parts: dict[tuple[str, int, bool], ActionEvents]
    ) -> None:
        """Add to ``parts`` the events of stages that equal a simulated stage.

        Their parameters get gradients, since no backward makes them.
        """
        program = self.batch[0].program
        for stage, first in equal_stages.earlier_stage.items():
            for (kind, part_stage, is_last), part in list(parts.items()):
                if part_stage == first:
                    key = kind, stage, is_last
                    parts.setdefault(key, equal_stages.events_for_stage(part, first, stage))
            if self.batch[0].scale is not None:
                first_params, own_params = (
                    params_of(program, self._part(Action("F", k, 0))) for k in (first, stage)
                )
                with self._transport.acting_in(self.placements[stage]):
                    give_gradients(first_params, own_params, self._imagined.empty)

    def _actions_of(self, m: int) -> list[Action]:
        """Return the actions of micro-batch ``m``, each after those whose results it needs.

        Forwards of all stages come first, then backwards from the last stage to the first.
        """
        kinds = {(action.kind, action.stage) for line in self.table.lines for action in line}
        stages = range(self.table.stages)
        actions = [Action("F", stage, m) for stage in stages]
        for stage in reversed(stages):
            actions += [Action(kind, stage, m) for kind in "BIW" if (kind, stage) in kinds]
        return actions

    def _sync_context(self, action: Action) -> Any:
        last = action.micro_batch == self.table.micro_batches - 1
        return nullcontext() if last else no_sync()

    def _send_shard(
        self, key: Any, move: StageTransfer, local: Tensor, src: TensorSpec, dst: TensorSpec
    ) -> None:
        """Log the sends of ``local`` for ``move``; box it if both stages are on one placement."""
        if src.placement == dst.placement:
            self._local_shards[key] = box(local, src, dst)
            return
        start = len(self._log.events)
        between.send(local, src, dst, "")
        sends = [e for e in self._log.events[start:] if isinstance(e, Message) and e.name == "send"]
        stage = move.dst if key[0] == "F" else move.src
        sent_bytes = self._current_part.sent.get(stage, (0, (0, 0)))[0]
        nbytes = sum(e.bytes for e in sends)
        if sends:
            ranks = (sends[0].ranks[0], sends[0].ranks[1])
            self._current_part.sent[stage] = sent_bytes + nbytes, ranks

    def _wait_for_shard(self, key: Any) -> Tensor:
        """Return the tensor ``key`` that another stage sent, and count its bytes as received.

        ``key`` has the direction ("F" or "B"), the index of the move, and the micro-batch.
        """
        if key in self._local_shards:
            return self._local_shards.pop(key)
        direction, index, m = key
        program = self.batch[m].program
        move = program.moves[index]
        src, dst = program.spec(move.source), program.spec(move.out)
        if direction == "B":
            src, dst = dst.dual, src.dual
        start = len(self._log.events)
        arrived = between.receive(src, dst, "")
        received = [e for e in self._log.events[start:] if isinstance(e, MemoryEvent)]
        self._current_part.received += sum(e.bytes for e in received)
        return arrived()


_METHODS = {
    "F": "_forward",
    "B": "_backward",
    "I": "_backward_of_inputs",
    "W": "_backward_of_weights",
}


def _lasting_allocations(events: list[Any]) -> list[MemoryEvent]:
    """Return the allocations that are not freed in ``events``, and frees of older memory.

    These change what is held after a schedule; all other allocations and frees cancel out.
    """
    memory_events = [e for e in events if isinstance(e, MemoryEvent)]
    allocated = {e.number for e in memory_events if e.bytes > 0}
    freed = {e.number for e in memory_events if e.bytes < 0}
    return [e for e in memory_events if (e.number in allocated) != (e.number in freed)]
