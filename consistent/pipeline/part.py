"""The part of a program that one stage runs."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..graph.program import Line, Move, Program, refs


@dataclass
class Part:
    """What one stage runs for a micro-batch.

    Args:
        lines: in order; lines on plain tensors alone are run by every stage that needs them.
        entering: moves from earlier stages.
        leaving: value -> the moves to later stages.
        losses: the values that backward begins at.
        results: the values that the program returns.
    """

    stage: int
    lines: list[Line] = field(default_factory=list)
    entering: list[Move] = field(default_factory=list)
    leaving: dict[int, list[Move]] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


def part_of(program: Program, stage: int | None) -> Part:
    """The part of ``stage``; None is what no stage runs: lines on plain tensors whose values the
    program returns."""
    part = Part(-1 if stage is None else stage)
    if stage is not None:
        part.entering = [move for move in program.moves if move.dst == stage]
        for move in program.moves:
            if move.src == stage:
                part.leaving.setdefault(move.source, []).append(move)
        part.losses = [i for i in program.losses if program.values[i].stage == stage]
    part.results = [i for i in refs(program.result) if program.values[i].stage == stage]
    needed = {*part.leaving, *part.losses, *part.results}
    for line in reversed(program.lines):
        mine = line.stage == stage and stage is not None
        # What is written into a plain tensor may be read through another one of the same memory.
        if mine or (line.stage is None and (line.writes or needed & set(line.outs))):
            part.lines.append(line)
            needed |= set(refs((line.args, line.kwargs)))
    part.lines.reverse()
    return part
