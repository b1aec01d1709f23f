"""Running a schedule: each rank runs the actions of its line, and messages go on beside them.

```
rank 0   F0 ->   F1 ->        -> B0            what a stage makes is sent when it is there, and
rank 1        -> F0  B0 ->    -> F1 B1 ->      nobody waits for it to be taken
```

A rank waits only for what its next action needs. Messages carry the move and the micro-batch that
they belong to, so their order does not matter, and no schedule can deadlock.
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
from ..graph.program import Move, Program
from ..movement import between
from ..movement.run import run as box
from ..movement.world import apart, device_of, my_coordinate
from ..spec import Placement, TensorSpec
from ..spec.tracer import callbacks
from .cell import Cell
from .part import Part, part_of
from .table import Action, Schedule

_HANDLE_SCHEDULE = callbacks("handle_schedule")

AHEAD = 2  # actions for which a rank receives before it comes to them

Key = tuple[str, int, int]  # "F" or "B", move, micro-batch


@dataclass(frozen=True)
class MicroBatch:
    """What is run for one micro-batch.

    Args:
        program: the one of its shapes.
        inputs: the tensors among its arguments.
        draws: the count of random ops at its begin.
        scale: what to do to a loss before backward; None without backward.
    """

    program: Program
    inputs: Sequence[Any]
    draws: int
    scale: Callable[[Any], Any] | None


@dataclass
class Run:
    """A schedule on its way, on this rank."""

    table: Schedule
    placements: Sequence[Placement]
    batch: Sequence[MicroBatch]
    doing: Action | None = None
    results: list[dict[int, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.results = [{} for _ in self.batch]
        self._parts: dict[tuple[int, int], Part] = {}
        self._cells: dict[tuple[int, int], Cell] = {}
        self._here: dict[Key, Tensor] = {}  # what a stage of this rank hands to another one
        self._coming: dict[Key, Callable[[], Tensor]] = {}
        self._sent: list[Handle] = []
        self._backwards: dict[int, int] = {}

    @property
    def line(self) -> tuple[Action, ...]:
        """What this rank does; nothing, if it is in no stage."""
        for stage, placement in enumerate(self.placements):
            if my_coordinate(placement) is not None:
                return self.table.lines[self.table.line_of[stage]]
        return ()

    def all(self) -> None:
        """Run the line to its end. Ranks of other stages are elsewhere in it."""
        line = self.line
        with apart():
            for k, action in enumerate(line):
                for later in line[k : k + 1 + AHEAD]:
                    self._expect(later)
                self.doing = action
                getattr(self, _METHODS[action.kind])(action)
        self.doing = None
        for handle in self._sent:
            handle.wait()

    # -- actions -----------------------------------------------------------------------------------

    def _forward(self, action: Action) -> None:
        stage, m = action.stage, action.micro_batch
        given, part = self.batch[m], self._part(action)
        device = device_of(self.placements[stage])
        arrived = {move.index: self._take(("F", move.index, m)) for move in part.entering}
        cell = Cell(given.program, part, device)
        going = cell.forward(given.inputs, arrived, given.draws, given.scale)
        if given.scale is not None:
            self._cells[stage, m] = cell
        self.results[m].update(cell.results)
        for index, local in going.items():
            for move in part.leaving[index]:
                src, dst = (given.program.spec(i) for i in (move.source, move.out))
                self._give(("F", move.index, m), move, local, src, dst)

    def _backward(self, action: Action) -> None:
        cell = self._cells.pop((action.stage, action.micro_batch))
        grads, back = self._gradients(action, cell), self._ways_back(action)
        with self._syncing(action):
            cell.backward(grads, lambda move, grad: back[move](grad))

    def _backward_of_inputs(self, action: Action) -> None:
        cell, back = self._cells[action.stage, action.micro_batch], self._ways_back(action)
        for move, grad in cell.backward_of_inputs(self._gradients(action, cell)).items():
            back[move](grad)

    def _backward_of_weights(self, action: Action) -> None:
        with self._syncing(action):
            self._cells.pop((action.stage, action.micro_batch)).backward_of_weights()

    def _syncing(self, action: Action) -> Any:
        """Gradients are summed over a stage's ranks with its last micro-batch."""
        done = self._backwards[action.stage] = self._backwards.get(action.stage, 0) + 1
        return nullcontext() if done == len(self.batch) else no_sync()

    def _gradients(self, action: Action, cell: Cell) -> dict[int, Tensor]:
        """For each value that left, the sum of the gradients of its moves."""
        m, found = action.micro_batch, {}
        for index in cell.wants:
            moves = self._part(action).leaving[index]
            total = self._take(("B", moves[0].index, m))
            for move in moves[1:]:
                total = total + self._take(("B", move.index, m))
            found[index] = total
        return found

    def _ways_back(self, action: Action) -> dict[int, Callable[[Tensor], None]]:
        """For each move that entered, what its gradient is given to."""
        program, part = self.batch[action.micro_batch].program, self._part(action)
        found: dict[int, Callable[[Tensor], None]] = {}
        for move in part.entering:
            key = "B", move.index, action.micro_batch
            src, dst = program.spec(move.out).dual, program.spec(move.source).dual
            found[move.index] = partial(self._give, key, move, src=src, dst=dst)
        return found

    # -- messages ----------------------------------------------------------------------------------

    def _give(self, key: Key, move: Move, local: Tensor, src: TensorSpec, dst: TensorSpec) -> None:
        if src.placement == dst.placement:
            self._here[key] = box(local, src, dst)
        else:
            self._sent += between.send(local, src, dst, _label(key, move))

    def _expect(self, action: Action) -> None:
        """Start receiving what the action needs."""
        m, kind = action.micro_batch, action.kind
        part, program = self._part(action), self.batch[action.micro_batch].program
        if kind == "F":
            wanted = [("F", move) for move in part.entering]
        elif kind != "W":
            moves = [move for moves in part.leaving.values() for move in moves]
            wanted = [("B", move) for move in moves if self._has_gradient(program, move)]
        else:
            wanted = []
        for way, move in wanted:
            key = (way, move.index, m)
            src, dst = program.spec(move.source), program.spec(move.out)
            if src.placement == dst.placement or key in self._coming:
                continue
            if way == "B":
                src, dst = dst.dual, src.dual
            self._coming[key] = between.receive(src, dst, _label(key, move))

    def _take(self, key: Key) -> Tensor:
        if key in self._here:
            return self._here.pop(key)
        found = self._coming[key]
        self._coming[key] = _taken
        return found()

    def _has_gradient(self, program: Program, move: Move) -> bool:
        tracked = program.values[move.out].requires_grad
        return tracked and program.values[move.source].requires_grad

    def _part(self, action: Action) -> Part:
        program = self.batch[action.micro_batch].program
        key = id(program), action.stage
        if key not in self._parts:
            self._parts[key] = part_of(program, action.stage)
        return self._parts[key]


def _taken() -> Tensor:
    raise AssertionError("a message is taken once")


_METHODS = {
    "F": "_forward",
    "B": "_backward",
    "I": "_backward_of_inputs",
    "W": "_backward_of_weights",
}


def _label(key: Key, move: Move) -> str:
    way, index, m = key
    what, a, b = ("gradient", move.dst, move.src) if way == "B" else ("value", move.src, move.dst)
    return f"{what} {index} of micro-batch {m} from stage {a} to stage {b}"


def run_all(run: Run) -> None:
    """Run the line, and make all ranks raise if this one cannot go on."""
    if _HANDLE_SCHEDULE:
        return _HANDLE_SCHEDULE[-1](run)
    try:
        run.all()
    except Exception as error:
        said = f"{type(error).__name__}: {error}".partition("\n")[0].rstrip(".")
        at = "" if run.doing is None else f" in {run.doing}"
        error.add_note(f"  rank {current().rank}{at}")
        if "every rank stops" not in str(error):
            current().abandon(f"rank {current().rank} raised{at}: {said}")
        raise


__all__ = ["MicroBatch", "Run", "run_all"]
