"""What each rank asks of its GPU for moves over symmetric memory, noted from the code that runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mirrored.transports.symmetric_memory import device_moves
from mirrored.transports.symmetric_memory.device_moves import DeviceMoves
from mirrored.transports.symmetric_memory.transport import SymmetricMemory
from tests.mirrored.transports.symmetric_memory.search import Kernel, Meeting, Program, Slot

SLOT = 256  # bytes
SHORT, LONG = torch.ones(4), torch.ones(24)  # summed in one step, and in two, by each rank a part


@dataclass
class Noted:
    """A rank's program, as the code asks for it; also what the code takes for memory, meeting and
    stream."""

    ranks: int
    at: int
    program: Program = field(default_factory=list)
    stream: str = "program"
    _last: tuple[str, int] | None = None  # stream and kernel at the end of the last step
    _after: list[int] = field(default_factory=list)  # what the next kernel waits for besides

    def __post_init__(self) -> None:
        self.memory = [torch.zeros(2 * SLOT, dtype=torch.uint8) for _ in range(self.ranks)]
        self._begins = [x.data_ptr() for x in self.memory]

    def begin(self) -> None:
        if self._last is not None and self._last[0] != self.stream:
            self._after = [self._last[1]]

    def end(self) -> None:
        self._last = self.stream, self._kernels() - 1

    def barrier(self, timeout_s: float) -> None:
        self.kernel(barrier=True)

    def kernel(self, reads: Sequence[Slot] = (), writes: Sequence[Slot] = (), **more: Any) -> None:
        """Add a kernel on the current stream."""
        after, self._after = tuple(self._after), []
        self.program.append(Kernel(self.stream, tuple(reads), tuple(writes), after=after, **more))

    def _kernels(self) -> int:
        return sum(isinstance(each, Kernel) for each in self.program)

    def slots(self, tensors: Sequence[Tensor]) -> list[Slot]:
        """Those in which the tensors lie."""
        found = []
        for x in tensors:
            for rank, begin in enumerate(self._begins):
                if 0 <= x.data_ptr() - begin < 2 * SLOT:
                    found.append(Slot(rank, (x.data_ptr() - begin) // SLOT))
        return found

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("meet"):
            raise AttributeError(name)
        return lambda *args: self.program.append(Meeting(name))


class _Copies(TorchDispatchMode):
    def __init__(self, noted: Noted) -> None:
        super().__init__()
        self._noted = noted

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._noted.kernel(writes=self._noted.slots(args[:1]))
        return func(*args, **(kwargs or {}))


class _Moves(SymmetricMemory):
    """Its group is given."""

    def __init__(self, moves: DeviceMoves, at: int) -> None:
        self.moves, self.at, self.kind = moves, at, "cpu"

    @property
    def rank(self) -> int:
        return self.at

    def _group(self, device: Any, ranks: Any) -> DeviceMoves:
        return self.moves


@contextmanager
def _kernels_noted(noted: Noted) -> Iterator[None]:
    def reduce(slots: list[Tensor], shape: Any, dim: int, start: int, out: Tensor, op: str) -> None:
        noted.kernel(noted.slots(slots), noted.slots([out]))

    def collect(slots: list[Tensor], out: Tensor, *where: Any) -> None:
        noted.kernel(noted.slots(slots), noted.slots([out]))

    kernels = SimpleNamespace(reduce=reduce, collect=collect)
    with patch.object(device_moves, "_C", kernels), _Copies(noted):
        yield


def _peers(t: Any, ranks: tuple[int, ...], noted: Noted) -> None:
    with t.peers(SHORT, ranks) as slots:
        noted.kernel(noted.slots(slots))


def _cut(ranks: tuple[int, ...]) -> list[int]:
    return [2] * len(ranks)


MOVES: dict[str, Callable[[Any, tuple[int, ...], Noted], Any]] = {
    "short all-reduce": lambda t, ranks, noted: t.all_reduce(SHORT, ranks),
    "all-reduce": lambda t, ranks, noted: t.all_reduce(LONG, ranks),
    "reduce-scatter": lambda t, ranks, noted: t.reduce_scatter(
        torch.ones(2 * len(ranks)), 0, _cut(ranks), ranks
    ),
    "all-gather": lambda t, ranks, noted: t.all_gather_into_tensor(
        torch.ones(2), 0, _cut(ranks), ranks
    ),
    "all-to-all": lambda t, ranks, noted: t.all_to_all_single(
        torch.ones(2 * len(ranks), 2), 0, _cut(ranks), 1, _cut(ranks), ranks
    ),
    "broadcast": lambda t, ranks, noted: t.broadcast(
        SHORT, SHORT.shape, SHORT.dtype, "cpu", 1, ranks
    ),
    "peers": _peers,
}


def programs(
    moves: Sequence[str], n: int, streams: Sequence[str] = ("program",), kind: type[Noted] = Noted
) -> list[Program]:
    """What each of n ranks asks for in these moves, of which each runs on the next stream."""
    return [program(moves, n, at, streams, kind) for at in range(n)]


def program(
    moves: Sequence[str], n: int, at: int, streams: Sequence[str], kind: type[Noted]
) -> Program:
    """That of one rank."""
    noted = kind(n, at)
    group = DeviceMoves(noted, noted, at, SLOT, 1.0)
    group.set_one_shot(SHORT.nbytes, SHORT.nbytes)
    transport = _Moves(group, at)
    with _kernels_noted(noted):
        for number, move in enumerate(moves):
            noted.stream = streams[number % len(streams)]
            MOVES[move](transport, tuple(range(n)), noted)
    return noted.program
