"""Test whether a recorded program holds for inputs whose values decide its control flow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..graph.program import ProgramLine, StagesProgram, refs
from ..graph.reads import same_answer
from .cell import Cell
from .part import ProgramPart


def program_fits_inputs(program: StagesProgram, inputs: Sequence[Any]) -> bool:
    """Return whether code that branches on tensor values would branch on ``inputs`` as recorded.

    If it would, ``program`` serves them; otherwise another one is recorded. Each value that the
    code read while it was recorded is computed again and compared. The inputs have the shapes and
    dtypes of the recording. They are not written to.
    """
    if not program.reads:
        return True
    cell = Cell(program, ProgramPart(-1), torch.device("cpu"))
    lines, position = _lines_of_reads(program), 0
    writes = any(line.writes for _, line in lines)
    env: dict[int, Any] = {
        # The needed lines run on copies if one of them writes in place.
        i: x if is_global(x) else x.detach().to("cpu", copy=writes)
        for i, x in zip(program.inputs, inputs, strict=True)
    }
    try:
        with torch.no_grad():
            for read in program.reads:
                while position < len(lines) and lines[position][0] < read.position:
                    cell.run_line(lines[position][1], env, 0)
                    position += 1
                if not same_answer(cell.call_line(read.line, env), read.answer):
                    return False
    except Exception:  # noqa: BLE001  (the code may handle what a call raises for these values)
        return False
    return True


def _lines_of_reads(program: StagesProgram) -> list[tuple[int, ProgramLine]]:
    """Return the lines that compute the values that the program depends on, with their positions.

    They are lines on plain tensors, which every rank can run.
    """
    needed = {i for read in program.reads for i in refs((read.line.args, read.line.kwargs))}
    lines = []
    for position, line in reversed(list(enumerate(program.lines))):
        if line.stage is None and (line.writes or needed & set(line.outs)):
            lines.append((position, line))
            needed |= set(refs((line.args, line.kwargs)))
    return lines[::-1]
