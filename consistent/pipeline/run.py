"""Run a pipeline schedule: each rank runs its own actions while messages are under way.

```
rank 0   F0 ->   F1 ->        -> B0            a result is sent as soon as it is computed, and
rank 1        -> F0  B0 ->    -> F1 B1 ->      the sender does not wait for the receiver
```

A rank waits only for the inputs of its next action. Each message is labelled with its move and its
micro-batch, so the order of messages does not matter, and no schedule can deadlock.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from torch import Tensor

from mirrored.comm import Handle
from mirrored.transports.default import current

from ..autograd.leaves import no_sync
from ..graph.program import StagesProgram, StageTransfer
from ..movement import between
from ..movement.run import run as box
from ..movement.world import device_of, excluding_others, my_coordinate
from ..spec import Placement, TensorSpec
from ..spec.tracer import callbacks
from .cell import Cell
from .part import ProgramPart, part_of
from .table import Action, Schedule

_HANDLE_SCHEDULE = callbacks("handle_schedule")

RECEIVE_AHEAD = 2  # number of later actions whose inputs a rank already receives

Key = tuple[str, int, int]  # "F" or "B", move, micro-batch


@dataclass(frozen=True)
class MicroBatch:
    """Program and inputs of one micro-batch.

    Args:
        program: the program recorded for its shapes.
        inputs: the tensors among its arguments.
        draws: the count of random ops when it begins, so that it draws the same numbers in any
            schedule.
        scale: is applied to a loss before backward; None if there is no backward.
    """

    program: StagesProgram
    inputs: Sequence[Any]
    draws: int
    scale: Callable[[Any], Any] | None


@dataclass
class ScheduleRun:
    """Execution of a schedule on this rank: its state and its actions.

    Args:
        table: the schedule.
        placements: the placement of each stage.
        batch: the micro-batches.
        current_action: the action that runs now; None before the first and after the last.
        results: for each micro-batch, index of a value -> the value, of the returned values that
            this rank computed.
    """

    table: Schedule
    placements: Sequence[Placement]
    batch: Sequence[MicroBatch]
    current_action: Action | None = None
    results: list[dict[int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = [{} for _ in self.batch]
        self._parts: dict[tuple[int, int], ProgramPart] = {}
        self._cells: dict[tuple[int, int], Cell] = {}
        # Shards passed between two stages of one placement.
        self._local_shards: dict[Key, Tensor] = {}
        # Functions that wait for the message and return it.
        self._pending_receives: dict[Key, Callable[[], Tensor]] = {}
        self._send_handles: list[Handle] = []
        self._backward_counts: dict[int, int] = {}  # stage -> how many of its backwards have begun

    @property
    def line(self) -> tuple[Action, ...]:
        """Return the actions (forwards and backwards) of this rank, in order.

        They are those of all stages on its placement; none if the rank is in no stage.
        """
        for stage, placement in enumerate(self.placements):
            if my_coordinate(placement) is not None:
                return self.table.lines[self.table.line_of[stage]]
        return ()

    def run_actions(self) -> None:
        """Run all actions of this rank, without waiting for ranks of other stages between them."""
        line = self.line
        with excluding_others():  # ranks of other stages do not follow the ops of this stage
            for k, action in enumerate(line):
                # Receives are started early, so that messages arrive during computation.
                for later in line[k : k + 1 + RECEIVE_AHEAD]:
                    self._start_receives(later)
                self.current_action = action
                getattr(self, _METHODS[action.kind])(action)
        self.current_action = None
        for handle in self._send_handles:
            handle.wait()

    # -- actions -----------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        micro_batch, part = self.batch[m], self._part(action)
        device = device_of(self.placements[stage])
        received_shards = {
            move.index: self._wait_for_shard(("F", move.index, m)) for move in part.entering
        }
        cell = Cell(micro_batch.program, part, device)
        leaving_shards = cell.forward(
            micro_batch.inputs, received_shards, micro_batch.draws, micro_batch.scale
        )
        if micro_batch.scale is not None:
            self._cells[stage, m] = cell
        self.results[m].update(cell.results)
        for index, local in leaving_shards.items():
            for move in part.leaving[index]:
                src, dst = (micro_batch.program.spec(i) for i in (move.source, move.out))
                self._send_shard(("F", move.index, m), move, local, src, dst)

    def _backward(self, action: Action) -> None:
        cell = self._cells.pop((action.stage, action.micro_batch))
        grads, senders = self._output_gradients(action, cell), self._gradient_senders(action)
        with self._sync_context(action):
            cell.backward(grads, lambda move, grad: senders[move](grad))

    def _backward_of_inputs(self, action: Action) -> None:
        cell, senders = (
            self._cells[action.stage, action.micro_batch],
            self._gradient_senders(action),
        )
        for move, grad in cell.backward_of_inputs(self._output_gradients(action, cell)).items():
            senders[move](grad)

    def _backward_of_weights(self, action: Action) -> None:
        with self._sync_context(action):
            self._cells.pop((action.stage, action.micro_batch)).backward_of_weights()

    def _sync_context(self, action: Action) -> Any:
        """Return a context for one backward that sums gradients over ranks if it is the last.

        Earlier backwards of the stage, for other micro-batches, only add to each rank's own
        gradient.
        """
        count = self._backward_counts[action.stage] = self._backward_counts.get(action.stage, 0) + 1
        return nullcontext() if count == len(self.batch) else no_sync()

    def _output_gradients(self, action: Action, cell: Cell) -> dict[int, Tensor]:
        """Return the gradient of each value that the stage sent to others, by the value's number.

        It is the sum of the gradients from all stages that used the value. Only values whose
        gradient backward needs have one.
        """
        m, gradients = action.micro_batch, {}
        for index in cell.values_needing_gradients:
            moves = self._part(action).leaving[index]
            total = self._wait_for_shard(("B", moves[0].index, m))
            for move in moves[1:]:
                total = total + self._wait_for_shard(("B", move.index, m))
            gradients[index] = total
        return gradients

    def _gradient_senders(self, action: Action) -> dict[int, Callable[[Tensor], None]]:
        """Return, for each move into the stage, a function that sends its value's gradient back.

        Each function takes this rank's shard of the gradient of the value that the move brought.
        """
        program, part = self.batch[action.micro_batch].program, self._part(action)
        senders: dict[int, Callable[[Tensor], None]] = {}
        for move in part.entering:
            key = "B", move.index, action.micro_batch
            src, dst = program.spec(move.out).dual, program.spec(move.source).dual
            senders[move.index] = partial(self._send_shard, key, move, src=src, dst=dst)
        return senders

    # -- messages ----------------------------------------------------------------------------------

    def _send_shard(
        self, key: Key, move: StageTransfer, local: Tensor, src: TensorSpec, dst: TensorSpec
    ) -> None:
        """Send the shard ``local`` to the stage at the other end of ``move``.

        Args:
            key: whether it is a value or a gradient, the move, and the micro-batch.
            move: the transfer between the two stages.
            local: this rank's shard.
            src, dst: specs of the tensor in this stage and in the other. If both stages are on one
                placement, nothing is sent: ``_local_shards`` keeps the boxed shard.
        """
        if src.placement == dst.placement:
            self._local_shards[key] = box(local, src, dst)
        else:
            self._send_handles += between.send(local, src, dst, _label(key, move))

    def _start_receives(self, action: Action) -> None:
        """Start to receive the tensors that ``action`` will read.

        Those from stages on its own placement need no message.
        """
        m, kind = action.micro_batch, action.kind
        part, program = self._part(action), self.batch[action.micro_batch].program
        if kind == "F":
            transfers = [("F", move) for move in part.entering]
        elif kind != "W":
            moves = [move for moves in part.leaving.values() for move in moves]
            transfers = [("B", move) for move in moves if self._has_gradient(program, move)]
        else:
            transfers = []
        for direction, move in transfers:
            key = (direction, move.index, m)
            src, dst = program.spec(move.source), program.spec(move.out)
            if src.placement == dst.placement or key in self._pending_receives:
                continue
            if direction == "B":
                src, dst = dst.dual, src.dual
            self._pending_receives[key] = between.receive(src, dst, _label(key, move))

    def _wait_for_shard(self, key: Key) -> Tensor:
        """Return this rank's shard of the tensor ``key``, waiting for its message if it has one."""
        if key in self._local_shards:
            return self._local_shards.pop(key)
        wait = self._pending_receives[key]
        self._pending_receives[key] = _raise_taken_twice  # frees the message; no second take
        return wait()

    def _has_gradient(self, program: StagesProgram, move: StageTransfer) -> bool:
        tracked = program.values[move.out].requires_grad
        return tracked and program.values[move.source].requires_grad

    def _part(self, action: Action) -> ProgramPart:
        """Return the part of the program that an action's stage runs."""
        program = self.batch[action.micro_batch].program
        key = id(program), action.stage
        if key not in self._parts:
            self._parts[key] = part_of(program, action.stage)
        return self._parts[key]


def _raise_taken_twice() -> Tensor:
    raise AssertionError("a message is taken once")


_METHODS = {
    "F": "_forward",
    "B": "_backward",
    "I": "_backward_of_inputs",
    "W": "_backward_of_weights",
}


def _label(key: Key, move: StageTransfer) -> str:
    """Return the text by which sender and receiver match a message."""
    direction, index, m = key
    kind, src, dst = (
        ("gradient", move.dst, move.src) if direction == "B" else ("value", move.src, move.dst)
    )
    return f"{kind} {index} of micro-batch {m} from stage {src} to stage {dst}"


def run_schedule(run: ScheduleRun) -> None:
    """Run the schedule on this rank; if it fails, make all other ranks raise, too.

    A tracer with ``handle_schedule``, such as a simulation, runs it instead.
    """
    if _HANDLE_SCHEDULE:
        return _HANDLE_SCHEDULE[-1](run)
    try:
        run.run_actions()
    except Exception as error:
        message = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        action_text = "" if run.current_action is None else f" in {run.current_action}"
        error.add_note(f"  rank {current().rank}{action_text}")
        # All ranks know of an error with these words already.
        if "every rank stops" not in str(error):
            current().abandon(f"rank {current().rank} raised{action_text}: {message}")
        raise


__all__ = ["MicroBatch", "ScheduleRun", "run_schedule"]
