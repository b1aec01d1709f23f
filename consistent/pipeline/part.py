"""Select the part of a recorded program that one stage runs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ..graph.program import ProgramLine, StagesProgram, StageTransfer, refs


@dataclass
class ProgramPart:
    """Part of a program that one stage runs for a micro-batch.

    Args:
        stage: the index of the stage; -1 for none.
        lines: the lines in order; lines on plain tensors only are run by every stage that needs
            them.
        entering: the moves (transfers of a value) from other stages into this one.
        leaving: index of a value -> the moves that send it to other stages.
        losses: the indices of the values that backward begins at.
        results: the indices of the values that the program returns and this stage computes.
    """

    stage: int
    lines: list[ProgramLine] = field(default_factory=list)
    entering: list[StageTransfer] = field(default_factory=list)
    leaving: dict[int, list[StageTransfer]] = field(default_factory=dict)
    losses: list[int] = field(default_factory=list)
    results: list[int] = field(default_factory=list)


def part_of(program: StagesProgram, stage: int | None) -> ProgramPart:
    """Return the part of ``program`` that ``stage`` runs.

    With None, return what every rank runs to return plain values: the lines on plain tensors that
    compute them.
    """
    part = ProgramPart(-1 if stage is None else stage)
    if stage is not None:
        part.entering = [move for move in program.moves if move.dst == stage]
        for move in program.moves:
            if move.src == stage:
                part.leaving.setdefault(move.source, []).append(move)
        part.losses = [i for i in program.losses if program.values[i].stage == stage]
    part.results = [i for i in refs(program.result) if program.values[i].stage == stage]
    needed = {*part.leaving, *part.losses, *part.results}
    for line in reversed(program.lines):  # backwards, so that all uses of a value are known
        in_stage = line.stage == stage and stage is not None
        # An in-place write to a plain tensor is always kept: an alias of the tensor may be needed.
        if in_stage or (line.stage is None and (line.writes or needed & set(line.outs))):
            part.lines.append(line)
            needed |= set(refs((line.args, line.kwargs)))
    part.lines.reverse()
    return part


_VIEWS = frozenset(
    """__getitem__ __get__ chunk detach diagonal expand flatten movedim narrow permute reshape
    select split squeeze t transpose unbind unflatten unsqueeze view view_as""".split()
)


def check_plain_writes(program: StagesProgram) -> None:
    """Raise if code between the stages' modules writes to a plain tensor from before the step.

    A buffer of the model is one. Such a line may run in several stages of one rank, and on some
    ranks not at all, so the tensor would get different values on different ranks.

    Raises:
        RuntimeError: a line outside the modules of stages writes to such a tensor.
    """
    existing = {i for i, value in enumerate(program.values) if value.read and value.spec is None}
    for line in program.lines:
        if line.is_module:
            continue
        if existing & set(refs(_written_arguments(line))):
            raise RuntimeError(
                f"{program.name}: {line.name} at {line.where} writes into a plain tensor that was "
                "made before the step, such as a buffer of the model.\n"
                "  Between the modules of stages a line may be run by several stages of a rank, "
                "and by some ranks alone.\n"
                "  Let a module that is part of a stage hold the tensor and write it in its "
                "forward, or write it outside the step."
            )
        # A view of an existing tensor shares its memory, so it counts as existing, too.
        if line.name in _VIEWS and existing & set(refs(line.args[:1])):
            existing |= set(line.outs)


def _written_arguments(line: ProgramLine) -> Any:
    """Return the arguments that ``line`` writes to in place.

    batch_norm and instance_norm write running statistics, although their names do not say so.
    """
    if line.writes:
        return line.args[:1], line.kwargs.get("out")
    arguments = dict(enumerate(line.args)) | line.kwargs
    if line.name == "batch_norm" and arguments.get("training", arguments.get(5)):
        names = (1, 2, "running_mean", "running_var")
    elif line.name == "instance_norm" and arguments.get("use_input_stats", arguments.get(5, True)):
        names = (1, 2, "running_mean", "running_var")
    else:
        names = ()
    return [arguments.get(name) for name in names]
