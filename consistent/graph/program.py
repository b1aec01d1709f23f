"""A recorded program: what a step calls, in order, with values in place of tensors.

```
%0 = input x
%1 = call model.first(%0)                            stage 0    f64[2, 8] S(0) on ...
%2 = move %1                                         stage 0 -> 1
%3 = call model.second(%2)                           stage 1
backward %3
return %3
```

Calls of the modules that are parts of stages are one line each; they run as they are written. What
lies between them is recorded op by op.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrored.readable import in_a_line

from ..spec import NdSbp, TensorSpec
from ..spec.nested import each_in

Read = Callable[[], torch.Tensor]


@dataclass(frozen=True, slots=True)
class Ref:
    """The value of that number, among arguments."""

    index: int

    def __repr__(self) -> str:
        return f"%{self.index}"


class Here:
    """Among arguments: the device of the rank that runs the line."""

    def __repr__(self) -> str:
        return "device"


HERE = Here()


@dataclass(slots=True)
class Value:
    """What is known of a tensor before it is there.

    Args:
        spec: of a global tensor; None of a plain one.
        stage: where it is made; None of a plain one, which any rank makes for itself.
        read: gives it where it is not a result: a parameter, or a tensor that the program uses.
    """

    spec: TensorSpec | None
    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    stage: int | None
    read: Read | None = None
    name: str = ""


@dataclass(slots=True)
class Line:
    """One call: of a module, or of a function of torch.

    Args:
        outs: the values of the tensors in its result, in order.
        mode: (whether gradients were recorded, autocast), None where it is as around the program.
        draws: how many random ops came before it, and how many are in it.
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
class Asked:
    """An answer that decided what the program is.

    Args:
        line: the question; its results are not tensors.
        at: how many lines of the program came before it.
        found: the answer.
    """

    line: Line
    at: int
    found: Any


@dataclass(slots=True)
class Move:
    """A value that goes from one stage to another."""

    index: int
    source: int
    out: int
    src: int  # stage
    dst: int
    where: str = ""


@dataclass(eq=False)
class Program:
    """Lines in the order in which they were met.

    Args:
        draws: how many random ops are in it.
        reads: what was asked of values that follow from its inputs: it is for inputs of which all
            answers are the same.
        graded: (the programs of a batch, this one first) -> of each parameter of the modules, the
            SBP of the gradient that the ranks of its stage have after backward, or None.
    """

    name: str
    values: list[Value] = field(default_factory=list)
    lines: list[Line] = field(default_factory=list)
    moves: list[Move] = field(default_factory=list)
    inputs: list[int] = field(default_factory=list)
    losses: list[int] = field(default_factory=list)
    result: Any = None
    draws: int = 0
    reads: list[Asked] = field(default_factory=list)
    graded: dict[tuple[Program, ...], list[NdSbp | None]] = field(default_factory=dict)

    def spec(self, index: int) -> TensorSpec:
        """The spec of a value that is a global tensor."""
        found = self.values[index].spec
        assert found is not None
        return found

    def __str__(self) -> str:
        rows = [(f"%{i} = input", "") for i in self.inputs]
        moves: dict[int, list[Move]] = {}
        for move in self.moves:
            moves.setdefault(move.source, []).append(move)
        for line in self.lines:
            outs = ", ".join(f"%{i}" for i in line.outs) or "_"
            kind = "call" if line.is_module else "run"
            given = [*map(repr, line.args), *(f"{k}={v!r}" for k, v in line.kwargs.items())]
            place = "any stage" if line.stage is None else f"stage {line.stage}"
            rows.append((f"{outs} = {kind} {in_a_line(line.name)}({', '.join(given)})", place))
            for i in line.outs:
                for m in moves.pop(i, []):
                    text = f"%{m.out} = move %{m.source} to {self.spec(m.out)}"
                    rows.append((text, f"stage {m.src} -> {m.dst}"))
        rows += [(f"backward %{i}", "") for i in self.losses]
        rows.append((f"return {self.result!r}", ""))
        width = max(len(text) for text, _ in rows) + 2
        return "\n".join(f"{text:<{width}}{note}".rstrip() for text, note in rows)


def refs(value: Any) -> list[int]:
    """The numbers of the values among arguments."""
    return [ref.index for ref in each_in(value, Ref)]
