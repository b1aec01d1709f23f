"""How many instructions a thread runs for one turn of a kernel's loop, and what that allows.

All is arithmetic over the machine code, for one NVIDIA H100 SXM; nothing here was measured. As a
program it prints the lines of the table in docs/gpu.md, for this tree or for another csrc/:

    python -m tests.csrc.steps [CSRC]"""

from __future__ import annotations

import heapq
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.csrc.compiling import ROOT
from tests.csrc.sass import Code, Instruction, build, bytes_of, code_of, in_flight, readable

SMS, QUARTERS, LANES, HERTZ = 132, 4, 32, 1.755e9
COPY = 3.0e12  # bytes in a second that a copy reads and writes
LATENCY_S = 700e-9  # from asking for global memory to having it, while all ask
REGISTERS, THREADS = 65536, 2048  # of a multiprocessor

CALLED = 70  # instructions of a subroutine of the compiler: a division of 64 bits, about

# Cycles for which an instruction keeps a quarter's pipe, by CUDA's table of throughputs for 9.0.
PIPES = {
    "float": (1, ("FADD", "FMUL", "FFMA")),
    "multiply": (2, ("IMAD",)),
    "integer": (
        2,
        ("IADD3", "LOP3", "ISETP", "FSETP", "SEL", "FSEL", "SHF", "PRMT", "FMNMX", "LEA", "MOV",
         "VIADD", "I2FP", "I2F", "F2I", "F2F", "PLOP3", "VIMNMX", "IABS", "FCHK"),
    ),
    "double": (2, ("DADD", "DMUL", "DFMA", "DSETP")),
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

    def cycles(self) -> int:
        """For which a quarter of a multiprocessor is busy: its scheduler, or its busiest pipe."""
        kinds = Counter(step.op.split(".")[0] for step in self.steps)
        busy = [sum(cycles * kinds[op] for op in ops) for cycles, ops in PIPES.values()]
        return max(sum(map(_length, self.steps)), *busy)

    def cycles_a_byte(self) -> float:
        return self.cycles() / self.moved("LDG", "STG")

    def share_of_copy(self, registers: int) -> float:
        """Bandwidth over that of a copy: what the pipes allow, and the bytes in flight."""
        loaded, stored = self.moved("LDG"), self.moved("STG")
        turns = SMS * QUARTERS * LANES * HERTZ / self.cycles()
        allowed = turns * (loaded + stored)
        if loaded:
            threads = min(THREADS, REGISTERS // (-(-registers // 8) * 8) // 256 * 256)
            turns = (
                SMS * threads * in_flight(self.steps * 2) / LATENCY_S / loaded
            )  # the first wait is in the next turn
            allowed = min(allowed, turns * (loaded + stored))
        return min(1.0, allowed / COPY)


def turn_of(code: Code, through: str = "", *, stores: bool = True) -> Turn | None:
    """The shortest loop through the widest load and the widest store, where the kernel has them and
    the loop `stores` at all, and through an instruction of which the name matches `through`."""
    steps = code.instructions
    load = _widest(steps, "LDG")
    wide = max(code.widths("STG"), default=0) if stores else None
    ends = [i for i, step in enumerate(steps) if _moves(step, "STG", wide)] or [None]
    ways = [i for i, step in enumerate(steps) if through and re.match(through, step.op)] or [None]
    rounds = [_round(steps, [end, load, way]) for end in ends for way in ways]
    found = [Turn(tuple(steps[i] for i in path)) for path in rounds if path]
    # Of the ways through a given instruction the longer ones join several loops; of others, the
    # shorter ones leave out elements that may lie outside.
    length = Turn.cycles if through else Turn.cycles_a_byte
    return min(found, key=lambda turn: (turn.divides(), length(turn)), default=None)


def _moves(step: Instruction, op: str, wide: int | None) -> bool:
    return step.op.split(".")[0] == op and bytes_of(step.op) == wide


def _round(steps: list[Instruction], given: list[int | None]) -> list[int]:
    """The shortest loop through the instructions that are given; empty if there is none."""
    stops = [stop for stop in given if stop is not None]
    parts = [_shortest(steps, *ends) for ends in zip(stops, stops[1:] + stops[:1], strict=True)]
    return [i for part in parts for i in part] if all(parts) else []


def _widest(steps: list[Instruction], op: str) -> int | None:
    """The last of the longest row of widest ones: a row ends where something waits for it."""
    found = [i for i, step in enumerate(steps) if step.op.split(".")[0] == op]
    if not found:
        return None
    wide = max(bytes_of(steps[i].op) for i in found)
    best, best_length, length, last = None, 0, 0, None
    for i in found:
        if bytes_of(steps[i].op) != wide:
            continue
        apart = last is None or any(steps[last].writes & steps[k].reads for k in range(last + 1, i))
        length = 1 if apart else length + 1
        last = i
        if length >= best_length:
            best, best_length = i, length
    return best


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


@dataclass(frozen=True)
class Row:
    """A kernel of the table, by the beginning of its name."""

    name: str
    through: str = ""  # the turn goes through an exponential, which was once a polynomial
    stores: bool = True
    loop: bool = True  # or it has none of a fixed length

    def line(self, name: str, code: Code, registers: int) -> str:
        """A line in Markdown."""
        turn = turn_of(code, self.through, stores=self.stores) if self.loop else None
        widest = [max(code.widths(op), default=0) or "" for op in ("LDG", "STG")]
        cells = [f"`{name}`", registers, *widest, code.in_flight() or "", "", ""]
        if turn is not None:
            share = 100 * turn.share_of_copy(registers)
            cells[5:] = [f"{turn.cycles_a_byte():.1f}", f"{share:.0f} %"]
        return "| " + " | ".join(map(str, cells)) + " |"


EXPONENTIAL = r"MUFU\.EX2|FFMA"
SHOWN = (
    Row("reduce_flat<BFloat16, BFloat16, 8>"),
    Row("reduce_flat<float, float, 4>"),
    Row("reduce_rows<BFloat16, BFloat16, 8, true>", loop=False),
    Row("reduce_kernel<BFloat16, 8, sum>"),
    Row("reduce_kernel<BFloat16, 8, max>"),
    Row("reduce_kernel<float, 4, sum>"),
    Row("forward_rows<BFloat16>", EXPONENTIAL, stores=False),
    Row("backward_rows<BFloat16>", EXPONENTIAL),
    Row("copy_rows<uint4>", loop=False),
    Row("scale_rows<BFloat16", loop=False),
    Row("add_rows<BFloat16", loop=False),
    Row("dropout_kernel<float>"),
    Row("dropout_kernel<BFloat16>"),
    Row("dropout_kernel<Half>"),
    Row("fill_kernel<Uniform<float>, float>"),
    Row("fill_kernel<Uniform<float>, BFloat16>"),
    Row("fill_kernel<Normal<float>, float>"),
    Row("fill_kernel<Normal<float>, BFloat16>"),
)


def main(csrc: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        for source in sorted(path for path in csrc.glob("*/*.cu") if path.parent.name != "tests"):
            cubin = Path(folder, f"{source.stem}.cubin")
            resources = build(source, 90, cubin)
            code, names = code_of(cubin), readable(list(resources))
            for at, name in names.items():
                for row in SHOWN:
                    if name.startswith(row.name):
                        print(row.line(name, code[at], resources[at].registers), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "csrc")
