"""How many instructions a thread runs for one turn of a kernel's loop, and what that allows.

All is arithmetic over the machine code and what is published of one GPU of each architecture;
nothing here was measured. `docs/make_kernels.py` writes it down."""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

from tests.csrc.sass import Code, Instruction, bytes_of, in_flight

QUARTERS, LANES = 4, 32  # of a multiprocessor; of a warp
REGISTERS = 65536  # of a multiprocessor
COPIED = 0.9  # of the published bandwidth, by a copy
LATENCY_S = 700e-9  # from asking for global memory to having it, while all ask
CALLED = 70  # instructions of a subroutine of the compiler: a division of 64 bits, about


@dataclass(frozen=True)
class Gpu:
    """What is published of a GPU, and of its architecture by CUDA's tables."""

    name: str
    multiprocessors: int
    hertz: float
    bytes_per_s: float  # of its memory
    threads: int  # that a multiprocessor holds
    float_cycles: int  # for which a float32 instruction keeps a quarter's pipe
    double_cycles: int

    @property
    def copy(self) -> float:
        """Bytes in a second that a copy reads and writes."""
        return COPIED * self.bytes_per_s


GPUS = {
    75: Gpu("T4", 40, 1.59e9, 0.32e12, 1024, 2, 64),
    80: Gpu("A100 SXM, 80 GB", 108, 1.41e9, 2.039e12, 2048, 2, 4),
    86: Gpu("A10", 72, 1.695e9, 0.6e12, 1536, 1, 64),
    89: Gpu("L4", 58, 2.04e9, 0.3e12, 1536, 1, 64),
    90: Gpu("H100 SXM", 132, 1.755e9, 3.35e12, 2048, 1, 2),
    100: Gpu("B200", 148, 1.965e9, 8e12, 2048, 1, 2),
    120: Gpu("RTX 5090", 170, 2.407e9, 1.792e12, 1536, 1, 64),
}

# Cycles for which an instruction keeps a quarter's pipe, by CUDA's table of throughputs, and the
# instructions. Those of floats are given by the GPU.
FLOATS = ("FADD", "FMUL", "FFMA")
DOUBLES = ("DADD", "DMUL", "DFMA", "DSETP")
PIPES = {
    "multiply": (2, ("IMAD",)),
    "integer": (
        2,
        ("IADD3", "LOP3", "ISETP", "FSETP", "SEL", "FSEL", "SHF", "PRMT", "FMNMX", "LEA", "MOV",
         "VIADD", "I2FP", "I2F", "F2I", "F2F", "PLOP3", "VIMNMX", "IABS", "FCHK"),
    ),
    "special": (8, ("MUFU",)),
}  # fmt: skip


@dataclass(frozen=True)
class Turn:
    """One turn of a loop that loads what it needs, and stores the result: along the fewest
    instructions, so without slow paths and without what is optional."""

    steps: tuple[Instruction, ...]

    def divides(self) -> bool:
        """Whether integers are divided on every way."""
        return any(map(_divides, self.steps))

    def moved(self, *ops: str) -> int:
        """Bytes that are loaded (LDG) or stored (STG)."""
        return sum(bytes_of(step.op) for step in self.steps if step.op.split(".")[0] in ops)

    def cycles(self, gpu: Gpu) -> int:
        """For which a quarter of a multiprocessor is busy: its scheduler, or its busiest pipe."""
        kinds = Counter(step.op.split(".")[0] for step in self.steps)
        pipes = [*PIPES.values(), (gpu.float_cycles, FLOATS), (gpu.double_cycles, DOUBLES)]
        busy = [sum(cycles * kinds[op] for op in ops) for cycles, ops in pipes]
        return max(sum(map(_length, self.steps)), *busy)

    def cycles_a_byte(self, gpu: Gpu) -> float:
        return self.cycles(gpu) / self.moved("LDG", "STG")

    def share_of_copy(self, registers: int, gpu: Gpu) -> float:
        """Bandwidth over that of a copy: what the pipes allow, and the bytes in flight."""
        loaded, stored = self.moved("LDG"), self.moved("STG")
        quarters = gpu.multiprocessors * QUARTERS
        allowed = quarters * LANES * gpu.hertz / self.cycles(gpu) * (loaded + stored)
        if loaded:
            threads = min(gpu.threads, REGISTERS // (-(-registers // 8) * 8) // 256 * 256)
            waits = in_flight(self.steps * 2)  # the first wait is in the next turn
            turns = gpu.multiprocessors * threads * waits / LATENCY_S / loaded
            allowed = min(allowed, turns * (loaded + stored))
        return min(1.0, allowed / gpu.copy)


def turn_of(
    code: Code, through: str = "", *, stores: bool = True, gpu: Gpu = GPUS[90]
) -> Turn | None:
    """The shortest loop through the widest load and the widest store, where the kernel has them and
    the loop `stores` at all, and through an instruction of which the name matches `through`."""
    steps = code.instructions
    loads = _widest(steps, "LDG") or [None]
    wide = max(code.widths("STG"), default=0) if stores else None
    ends = [i for i, step in enumerate(steps) if _moves(step, "STG", wide)] or [None]
    ways = [i for i, step in enumerate(steps) if through and re.match(through, step.op)] or [None]
    rounds = [_round(steps, [end, load, way]) for end in ends for load in loads for way in ways]
    found = [Turn(tuple(steps[i] for i in path)) for path in rounds if path]
    # Of the ways through a given instruction the longer ones join several loops; of others, the
    # shorter ones leave out elements that may lie outside.
    length = Turn.cycles if through else Turn.cycles_a_byte
    return min(found, key=lambda turn: (turn.divides(), length(turn, gpu)), default=None)


def _moves(step: Instruction, op: str, wide: int | None) -> bool:
    return step.op.split(".")[0] == op and bytes_of(step.op) == wide


def _round(steps: list[Instruction], given: list[int | None]) -> list[int]:
    """The shortest loop through the instructions that are given; empty if there is none."""
    stops = [stop for stop in given if stop is not None]
    parts = [_shortest(steps, *ends) for ends in zip(stops, stops[1:] + stops[:1], strict=True)]
    return [i for part in parts for i in part] if all(parts) else []


def _widest(steps: list[Instruction], op: str) -> list[int]:
    """The last of each longest row of widest ones: a row ends where something waits for it."""
    found = [i for i, step in enumerate(steps) if step.op.split(".")[0] == op]
    wide = max((bytes_of(steps[i].op) for i in found), default=0)
    rows: dict[int, int] = {}  # the last of a row -> the row's length
    last = None
    for i in found:
        if bytes_of(steps[i].op) != wide:
            continue
        apart = last is None or any(steps[last].writes & steps[k].reads for k in range(last + 1, i))
        rows[i] = 1 if last is None or apart else rows.pop(last) + 1
        last = i
    return [i for i, length in rows.items() if length == max(rows.values())]


def _length(step: Instruction) -> int:
    return CALLED if step.op.startswith("CALL") else 1


def _divides(step: Instruction) -> bool:
    """A division of integers begins with a reciprocal, rounded up. For 64 bits nvcc writes both
    ways: in 32 bits where they are enough, else by a call."""
    called = step.op.startswith("CALL") and re.search(r"_(div|rem)_[su]64", step.target or "")
    return bool(called) or (step.op.startswith("I2F") and ".RP" in step.op)


def _cost(step: Instruction) -> int:
    """A way around a division is taken, however long: boxes of one run have one."""
    return _length(step) + 10_000 * _divides(step)


def _next(steps: list[Instruction], labels: dict[str, int], i: int) -> Iterator[int]:
    step = steps[i]
    name = step.op.split(".")[0]
    if name == "BRA" and step.target in labels:
        yield labels[step.target]
    if i + 1 < len(steps) and (step.guarded or name not in ("BRA", "EXIT", "RET")):
        yield i + 1


def _shortest(steps: list[Instruction], start: int, stop: int) -> list[int]:
    """The instructions from behind `start` to `stop`, as few as possible; none if there is no
    way."""
    labels = {step.label: i for i, step in enumerate(steps) if step.label}
    came: dict[int, int] = {}
    queue = [(0, i, start) for i in _next(steps, labels, start)]
    heapq.heapify(queue)
    while queue:
        length, i, before = heapq.heappop(queue)
        if i in came:
            continue
        came[i] = before
        if i == stop:
            break
        for to in _next(steps, labels, i):
            heapq.heappush(queue, (length + _cost(steps[i]), to, i))
    if stop not in came:
        return []
    path = [stop]
    while came[path[-1]] != start:
        path.append(came[path[-1]])
    return path[::-1]
