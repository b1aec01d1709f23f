"""Recorded program: the calls of a step, in order, with numbered values in place of tensors.

```
%0 = input x
%1 = call model.first(%0)                            stage 0    f64[2, 8] S(0) on ...
%2 = move %1                                         stage 0 -> 1
%3 = call model.second(%2)                           stage 1
backward %3
return %3
```

A call of a module that is part of a stage is one line, and runs the module as it is written. Code
between these modules is recorded op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrored.readable import on_one_line

from ..spec import NdSbp, TensorSpec
from ..spec.nested import instances_in

Read = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ref:
    """Reference to a value of the program by its number.

    It stands in place of a tensor among the arguments of a line, and prints as in ``%3``.
    """

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


class LocalDevice:
    """Placeholder for the device of the rank that runs the line, among the arguments of a line.

    A program is recorded on ``meta``, and ``torch.zeros(3, device=...)`` runs on each rank's
    device.
    """

    def __repr__(self) -> str:
        return "device"


LOCAL_DEVICE = LocalDevice()


@dataclass(slots=True)
class ProgramValue:
    """Metadata of a tensor of the program, known before the program runs.

    Args:
        spec: spec of a global tensor; None for a plain tensor.
        shape, dtype, requires_grad: as of the tensor; the shape is logical.
        stage: stage that makes it; None for a plain tensor, which any rank makes for itself.
        read: returns the tensor if no line makes it: a parameter, or another tensor from before the
            step. None for a value that a line makes.
        name: name of a parameter.
    """

    spec: TensorSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stage: int | None
    read: Read | None = None
    name: str = ""


@dataclass(slots=True)
class ProgramLine:
    """Line of a program: one call of a module or of a torch function.

    Args:
        outs: numbers of the tensors in its result, in order.
        mode: (whether gradients were recorded, autocast) during the call; None if both are as at
            the start of the step.
        draws: (number of random ops before the line, number of random ops in it).
    """

    name: str
    target: Callable[..., Any]
    args: tuple
    kwargs: dict[str, Any]
    outs: tuple[int, ...]
    stage: int | None
    is_module: bool = False
    mode: tuple[bool, tuple] | None = None
    draws: tuple[int, int] = (0, 0)
    where: str = ""  # the user's file and line
    writes: bool = False  # into one of its arguments


@dataclass(frozen=True, slots=True)
class Question:
    """Question about tensor values, such as ``mask.all()``, whose answer the program depends on.

    Before a program is used for another batch, its questions are asked again, and it is used only
    if the answers are the same.

    Args:
        line: the call that asked; its results are not tensors.
        position: number of lines of the program before it.
        answer: the answer while the program was recorded.
    """

    line: ProgramLine
    position: int
    answer: Any


@dataclass(slots=True)
class StageTransfer:
    """Transfer of a value from one pipeline stage to another, also called a move.

    Args:
        index: its number among the moves of the program.
        source: number of the value that is sent.
        out: number of the value that arrives.
        src, dst: the two stages.
        where: the user's source line.
    """

    index: int  # among the moves of the program
    source: int  # the value that is sent
    out: int  # the value that arrives
    src: int  # stage
    dst: int  # stage
    where: str = ""


@dataclass(eq=False)  # compared and hashed by identity: programs are keys of ``grad_sbps``
class StagesProgram:
    """Recorded step: its lines, moves and values, in the order in which they were recorded.

    Args:
        name: the name in error messages.
        values: the tensors; their index is their number.
        lines: the calls of modules and torch functions.
        moves: transfers between stages.
        inputs: numbers of the tensors among the arguments of the step.
        losses: numbers of the tensors on which the step calls backward.
        result: what the step returns, with a ``Ref`` for each tensor.
        draws: number of random ops in the program.
        reads: questions about values that follow from its inputs; the program serves only inputs
            that give all the same answers.
        grad_sbps: cache: the programs of a batch (this one first) -> for each parameter of the
            modules, the SBP of its gradient after backward on the ranks of its stage; None if it
            has no gradient.
    """

    name: str
    values: list[ProgramValue] = field(default_factory=list)
    lines: list[ProgramLine] = field(default_factory=list)
    moves: list[StageTransfer] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    result: Any = None
    draws: int = 0
    reads: list[Question] = field(default_factory=list)
    grad_sbps: dict[tuple[StagesProgram, ...], list[NdSbp | None]] = field(default_factory=dict)

    def spec(self, index: int) -> TensorSpec:
        """Return the spec of the value with number ``index``, which must be a global tensor."""
        value_spec = self.values[index].spec
        assert value_spec is not None
        return value_spec

    def __str__(self) -> str:
        rows = [(f"%{i} = input", "") for i in self.inputs]
        moves: dict[int, list[StageTransfer]] = {}
        for move in self.moves:
            moves.setdefault(move.source, []).append(move)
        for line in self.lines:
            outs = ", ".join(f"%{i}" for i in line.outs) or "_"
            kind = "call" if line.is_module else "run"
            arg_texts = [*map(repr, line.args), *(f"{k}={v!r}" for k, v in line.kwargs.items())]
            stage_text = "any stage" if line.stage is None else f"stage {line.stage}"
            rows.append(
                (f"{outs} = {kind} {on_one_line(line.name)}({', '.join(arg_texts)})", stage_text)
            )
            for i in line.outs:
                for m in moves.pop(i, []):
                    text = f"%{m.out} = move %{m.source} to {self.spec(m.out)}"
                    rows.append((text, f"stage {m.src} -> {m.dst}"))
        rows += [(f"backward %{i}", "") for i in self.losses]
        rows.append((f"return {self.result!r}", ""))
        width = max(len(text) for text, _ in rows) + 2
        return "\n".join(f"{text:<{width}}{note}".rstrip() for text, note in rows)


def refs(value: Any) -> list[int]:
    """Return the numbers of the values to which ``Ref`` objects in ``value`` refer."""
    return [ref.index for ref in instances_in(value, Ref)]
