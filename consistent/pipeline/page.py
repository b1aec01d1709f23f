"""Write a staged step as one self-contained HTML page.

The page shows the schedule, and side by side what each stage does with a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..dispatch.plans.shards import is_global
from ..drawing.pages.html import bar, escaped, frame, labelled, numbers
from ..drawing.words import layout_text, sbp_text, short_site, source_line
from ..graph.program import ProgramLine, ProgramValue, StagesProgram, StageTransfer
from ..spec import Placement, TensorSpec
from ..spec.bytes_text import bytes_text
from .part import Part, part_of
from .picture import SchedulePicture
from .stage import stage_of


def page(
    name: str,
    program: StagesProgram,
    picture: SchedulePicture,
    placements: Sequence[Placement],
    modules: Iterable[Any],
) -> str:
    """Return the HTML page of a pipeline: its schedule, and what each stage does.

    Args:
        name: the name in the title.
        program: the program of one micro-batch.
        picture: the drawing of the schedule.
        placements: the placement of each stage.
        modules: the modules of the model, for the bytes of their parameters.
    """
    table, held = picture.table, _parameters(modules, len(placements))
    parts = [part_of(program, stage) for stage in range(len(placements))]
    longest = max((_held(value) for value in program.values), default=0)
    moved = sum(_whole(program.values[move.source]) for move in program.moves)
    stages = [_stage(program, *each, longest) for each in zip(parts, placements, held, strict=True)]
    idle = f"{picture.played.bubble:.0%}"
    body = [
        numbers(
            (
                (f"{len(placements)}", "stages"),
                (f"{table.micro_batches}", "micro-batches"),
                (idle, "of the time idle, on paper"),
                (bytes_text(moved), "moved forward for each micro-batch"),
                (bytes_text(max(held, default=0)), "parameters on a rank, at most"),
            )
        ),
        "<h2>The schedule</h2><p class=note>Played on paper: a backward takes as long as two "
        "forwards, and messages take no time.</p>"
        f"<div class=drawing>{picture.drawing().inside()}</div>",
        "<h2>The stages</h2><p class=note>What each one does in the forward of a micro-batch, with "
        "the layout of the result and the bytes that its first rank holds of it. Marked lines are "
        "moves between stages, with the bytes of the tensor; its gradient goes back the same way. "
        "Modules stand in bold; what is inside them runs as it is written.</p>"
        f"<div class=stages>{''.join(stages)}</div>",
    ]
    lead = (
        f"{len(placements)} stages run {table.micro_batches} micro-batches by the schedule "
        f"{table.name}; placements stand idle {idle} of the time."
    )
    return frame(f"Stages of {name}", lead, "\n".join(body))


def _stage(
    program: StagesProgram, part: Part, placement: Placement, held: int, longest: int
) -> str:
    """Return the HTML of one stage: its moves and lines, in order.

    ``held`` are the bytes of its parameters, and ``longest`` those of the largest value of the
    program, which has the longest bar.
    """
    rows = [_move(program, move, f"from stage {move.src}", longest) for move in part.entering]
    before = ""
    for line in part.lines:
        if line.where != before:
            before = line.where
            source = escaped(f"{short_site(before)}  {source_line(before)}")
            rows.append(f"<code class=at title='{source}'>{source}</code>")
        rows.append(_line(program, line, longest))
        for i in line.outs:
            rows += [
                _move(program, move, f"to stage {move.dst}", longest)
                for move in part.leaving.get(i, ())
            ]
    rows += [f"<div class=step><code>backward %{i}</code></div>" for i in part.losses]
    return (
        f"<section><h3>stage {part.stage}</h3><p class=note>{escaped(placement)}"
        f"<br>parameters: {bytes_text(held)} on a rank</p>{''.join(rows)}</section>"
    )


def _line(program: StagesProgram, line: ProgramLine, longest: int) -> str:
    outs = ", ".join(f"%{i}" for i in line.outs) or "_"
    named = [f"{k}={v!r}" for k, v in line.kwargs.items() if v is not None]
    given = [*map(repr, line.args), *named]
    text = f"{outs} = {line.name}({', '.join(given)})"
    tag = " <span class='tag plain'>plain</span>" if line.stage is None else ""
    made = [program.values[i] for i in line.outs]
    layouts = ", ".join(labelled(_layout(value)) for value in made[:2])
    kind = "<b>" if line.is_module else ""
    return (
        f"<div class=step><code title='{escaped(text)}'>{kind}{escaped(text)}"
        f"{kind and '</b>'}</code><span>{layouts}{tag}</span>"
        f"{bar(sum(map(_held, made)), longest)}</div>"
    )


def _move(program: StagesProgram, move: StageTransfer, way: str, longest: int) -> str:
    source, made = program.values[move.source], program.values[move.out]
    return (
        f"<div class='step moves'><code>%{move.out} = move %{move.source} {way}</code>"
        f"<span>{labelled(_layout(source))} &rarr; {labelled(_sbp(made))}</span>"
        f"{bar(_whole(source), longest, 'sent')}</div>"
    )


def _layout(value: ProgramValue) -> str:
    return layout_text(value.spec, value.dtype, value.shape)


def _sbp(value: ProgramValue) -> str:
    return "" if value.spec is None else sbp_text(value.spec)


def _whole(value: ProgramValue) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(value.shape) * value.dtype.itemsize


def _held(value: ProgramValue) -> int:
    """Return the bytes that the first rank holds of a value."""
    return _whole(value) if value.spec is None else _of_first(value.spec)


def _of_first(spec: TensorSpec) -> int:
    """Return the bytes of the first rank's shard, which is the largest of all shards."""
    return math.prod(spec.local_shape((0,) * spec.placement.ndim)) * spec.dtype.itemsize


def _parameters(modules: Iterable[Any], stages: int) -> list[int]:
    """Return the bytes of the parameters on the first rank of each of ``stages`` stages."""
    found: list[dict[int, int]] = [{} for _ in range(stages)]
    for module in modules:
        stage = stage_of(module)
        if stage is not None:
            for p in module.parameters():
                whole = p.numel() * p.dtype.itemsize
                spec = p._spec if is_global(p) else None
                # By identity: a parameter that a stage uses twice is counted once.
                found[stage.index][id(p)] = whole if spec is None else _of_first(spec)
    return [sum(each.values()) for each in found]
