"""Log of what the simulated ranks did, in order: ops, messages, allocations, calls of modules and
marks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ...cost_model.model import Caller


@dataclass(slots=True)
class SimulatedOp:
    """Event: ``rank`` runs one torch op on its shards.

    Args:
        work: the ``Work`` of the call, from which a machine computes its seconds.
        where: line of the program that called it.
        placement: placement of its tensors, if they are global; ranks outside the placement run the
            op on ``meta``.
        cold: the share of its inputs that no cache holds, 0 to 1.
        caller: who calls it, which decides how much Python time it takes
            (``Machine.op_host_seconds``).
    """

    rank: int
    work: Any  # cost_model.work.Work
    where: str
    placement: Any = None
    cold: float = 0.0
    caller: Caller = "forward"


@dataclass(slots=True)
class Message:
    """Event: a rank makes one call of a collective or point-to-point communication.

    Args:
        rank: the rank that makes the call.
        name: name of the communication, such as "all_reduce".
        bytes: bytes that it sends.
        ranks: the ranks that take part.
        where: line of the program that sends it.
        start, wait: number of an asynchronous message that begins or ends here; 0 for calls that do
            both at once.
        tensors: number of tensors that travel together in it.
        caller: who sends it, as in ``SimulatedOp``.
    """

    rank: int
    name: str
    bytes: int
    ranks: tuple[int, ...]
    where: str
    start: int = 0
    wait: int = 0
    tensors: int = 1
    caller: Caller = "forward"


@dataclass(slots=True)
class MemoryEvent:
    """Event: ``rank`` allocates (``bytes`` > 0) or frees (``bytes`` < 0) a block of memory.

    ``number`` identifies the memory; ``message`` tells whether it is the result of a message.
    """

    rank: int
    number: int
    bytes: int
    message: bool = False  # it is the result of a message


@dataclass(slots=True)
class Mark:
    """Event: the program is at a point that divides the log into steps.

    ``what`` is "forward" (a forward begins) or "step" (an optimizer step has ended).
    """

    what: str


@dataclass(slots=True)
class ModuleEntered:
    """Event: a call of the module ``name`` begins.

    ``arguments`` is a copy of its (args, kwargs), with a ``calls.Blank`` in place of each imagined
    tensor.
    """

    name: str
    arguments: Any


@dataclass(slots=True)
class ModuleLeft:
    """Event: a call of the module ``name`` ends.

    ``out`` has a ``calls.Blank`` for each imagined tensor of its result.
    """

    name: str
    out: list[Any]


@dataclass(slots=True)
class ScheduleEvent:
    """Event: a pipeline schedule ran one step.

    ``run``, a ``stages.SimulatedSchedule``, has the events of its actions.
    """

    run: Any


@dataclass
class Log:
    """Events of a simulation in order, and how often the program read values.

    The timeline and the peak of memory are computed from the events.
    """

    events: list[Any] = field(default_factory=list)
    read: dict[str, int] = field(default_factory=dict)  # values that were taken for 0, by line

    def note_read(self, what: str) -> None:
        """Note that the program read a value that does not exist; ``what`` has method and line."""
        self.read[what] = self.read.get(what, 0) + 1
