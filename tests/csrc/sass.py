"""What nvcc made of a CUDA source: registers and spills as ptxas counts them, loads and stores as
they stand in the machine code."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import astuple, dataclass, field
from pathlib import Path

from tests.csrc.compiling import NVCC, ROOT, run

FLAGS = "-std=c++17", "-O3", "-fmad=false"  # of setup.py, but for the processor


def find_disassembler() -> str | None:
    """nvdisasm of the toolkit, or the one that triton brings with it."""
    found = shutil.which("nvdisasm")
    triton = None if found else importlib.util.find_spec("triton")
    if triton is None or triton.origin is None:
        return found
    beside = Path(triton.origin).parent / "backends" / "nvidia" / "bin" / "nvdisasm"
    return str(beside) if beside.exists() else None


NVDISASM = find_disassembler()
CUFILT = shutil.which("c++filt")


@dataclass(frozen=True)
class Resources:
    """What ptxas says of a kernel: registers of a thread, bytes of its stack frame (arrays that are
    indexed at run time, and spills), bytes of spills stored and loaded."""

    registers: int
    stack: int
    spilled: int


@dataclass(frozen=True)
class Instruction:
    label: str | None  # the label that stands before it
    guarded: bool  # it may be skipped, by a predicate
    op: str  # LDG.E.128
    writes: frozenset[str]
    reads: frozenset[str]
    target: str | None  # of a branch or a call


@dataclass
class Code:
    """The instructions of one kernel, without the subroutines behind it."""

    instructions: list[Instruction] = field(default_factory=list)

    def count(self, *ops: str) -> int:
        return sum(step.op.split(".")[0] in ops for step in self.instructions)

    def calls(self, name: str) -> int:
        """How many calls of the compiler's subroutines have `name` in theirs."""
        return sum(
            step.op.startswith("CALL") and name in (step.target or "") for step in self.instructions
        )

    def widths(self, op: str) -> Counter[int]:
        """Bytes that a thread moves by one instruction -> how many such instructions there are."""
        found = [step for step in self.instructions if step.op.split(".")[0] == op]
        return Counter(bytes_of(step.op) for step in found)

    def in_flight(self) -> int:
        """The most bytes that a thread has in flight, along any straight piece of the code."""
        pieces, piece = [], []
        for step in self.instructions:
            piece.append(step)
            if step.op.split(".")[0] in ("BRA", "EXIT", "RET") and not step.guarded:
                pieces.append(piece)
                piece = []
        return max(map(in_flight, [*pieces, piece]))


def in_flight(steps: Iterable[Instruction]) -> int:
    """The most bytes of global memory that a thread has asked for when it first waits for some of
    them, if it runs these instructions one after the other."""
    most = 0
    pending: list[Instruction] = []
    for step in steps:
        if any(load.writes & step.reads for load in pending):
            most = max(most, sum(bytes_of(load.op) for load in pending))
        pending = [load for load in pending if not load.writes & (step.reads | step.writes)]
        if step.op.split(".")[0] == "LDG":
            pending.append(step)
    return most


def bytes_of(op: str) -> int:
    parts = op.split(".")
    for name, size in {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16}.items():
        if name in parts:
            return size
    return 4


def resources_of(printed: str) -> dict[str, Resources]:
    """What `nvcc -Xptxas -v` printed, by the mangled name of the kernel."""
    pattern = (
        r"Compiling entry function '(\w+)'.*?"
        r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads.*?"
        r"Used (\d+) registers"
    )
    return {
        name: Resources(int(registers), int(stack), int(stored) + int(loaded))
        for name, stack, stored, loaded, registers in re.findall(pattern, printed, re.S)
    }


def build(source: Path, arch: int, cubin: Path) -> dict[str, Resources]:
    """Compiles one source for one processor, with the flags that it is shipped with."""
    assert NVCC is not None
    flags = *FLAGS, f"-arch=sm_{arch}", "-Werror=all-warnings"
    return resources_of(
        run(NVCC, *flags, "-Xptxas", "-v", "-cubin", source, "-o", cubin, errors=True)
    )


@functools.cache
def kept(source: Path, arch: int) -> tuple[Path, dict[str, Resources]]:
    """The same from build/sass/, where cubins are kept by the hash of all that they are made of."""
    assert NVCC is not None
    hashed = hashlib.sha256(run(NVCC, "--version").encode() + source.read_bytes())
    for path in sorted(source.parents[1].glob("*/*.*h")):
        hashed.update(path.read_bytes())
    cubin = ROOT / "build" / "sass" / f"{source.stem}-{arch}-{hashed.hexdigest()[:24]}.cubin"
    said = cubin.with_suffix(".json")
    if not said.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        partly = cubin.with_suffix(f".{os.getpid()}")
        resources = build(source, arch, partly)
        partly.replace(cubin)
        partly.write_text(json.dumps({at: astuple(found) for at, found in resources.items()}))
        partly.replace(said)
    return cubin, {at: Resources(*found) for at, found in json.loads(said.read_text()).items()}


@functools.cache
def code_of(cubin: Path, only: frozenset[str] | None = None) -> dict[str, Code]:
    """The code of each kernel in a cubin, or of those in ``only``, by its mangled name."""
    assert NVDISASM is not None
    return dict(_kernels(run(NVDISASM, "-c", cubin), only))


def readable(names: list[str]) -> dict[str, str]:
    """Mangled name -> `reduce_flat<Half, float, 4>`: without namespaces and arguments."""
    assert CUFILT is not None
    lines = run(CUFILT, *names).splitlines()
    return {name: _shortened(line) for name, line in zip(names, lines, strict=True)}


def _shortened(line: str) -> str:
    line = re.sub(r"consistent::|\(anonymous namespace\)::|peer::|std::", "", line)
    line = re.sub(r"\(Op\)(\d)", lambda m: ("sum", "max", "min")[int(m[1])], line)
    return line.removeprefix("void ").split("(")[0]


def _kernels(text: str, only: frozenset[str] | None) -> Iterator[tuple[str, Code]]:
    for section in re.split(r"^\s*\.section\s+\.text\.", text, flags=re.M)[1:]:
        name = re.match(r"\w+", section)
        assert name is not None
        if only is None or name[0] in only:
            yield name[0], Code(list(_instructions(section)))


def _instructions(section: str) -> Iterator[Instruction]:
    label = None
    for line in section.splitlines():
        if re.match(r"\s*\.type\s+\$__internal", line) or line.startswith("$__internal"):
            return
        if named := re.match(r"(\.L_\w+):", line):
            label = named[1]
        if found := re.match(
            r"\s*/\*[0-9a-f]+\*/\s+(@!?U?P\d+ )?\s*([A-Z0-9_.]+)\s*(.*?) *;", line
        ):
            yield _instruction(label, *found.groups())
            label = None


def _instruction(label: str | None, guard: str | None, op: str, rest: str) -> Instruction:
    operands = rest.split(", ") if rest else []
    target = re.search(r"`\(([^)]+)\)", rest)
    stores = op.split(".")[0] in ("STG", "STS", "STL", "ST", "BRA", "CALL", "EXIT", "RET")
    written = [] if stores else operands[:1]
    reads = operands if stores else operands[1:]
    chosen = guard is not None or (op.startswith("BRA") and len(operands) > 1)
    return Instruction(
        label, chosen, op, _registers(written, op), _registers(reads, "*"),
        None if target is None else target[1],
    )  # fmt: skip


def _registers(operands: list[str], op: str) -> frozenset[str]:
    """The 32-bit registers among the operands. A register is the first of as many as `op` moves;
    for reading, "*", all of a vector count as read where its first one is."""
    found = set()
    for operand in operands:
        for number in re.findall(r"\bR(\d+)\b", operand):
            wide = max(1, bytes_of(op) // 4) if op != "*" else 4 if ".128" in operand else 1
            found |= {f"R{int(number) + k}" for k in range(wide)}
            if ".64" in operand:
                found.add(f"R{int(number) + 1}")
    return frozenset(found)
