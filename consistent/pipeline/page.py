"""Write a staged step as one self-contained HTML page.

The page shows the schedule, and side by side what each stage does with a micro-batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from ..dispatch.plans.shards import is_global
from ..drawing.pages.html import bar, escape, frame, layout_html, numbers
from ..drawing.words import layout_text, sbp_text, short_site, source_line
from ..graph.program import ProgramLine, ProgramValue, StagesProgram, StageTransfer
from ..spec import Placement, TensorSpec
from ..spec.bytes_text import bytes_text
from .part import ProgramPart, part_of
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
    table, parameter_bytes = picture.table, _parameter_bytes(modules, len(placements))
    parts = [part_of(program, stage) for stage in range(len(placements))]
    max_bytes = max((_shard_bytes(value) for value in program.values), default=0)
    moved_bytes = sum(_tensor_bytes(program.values[move.source]) for move in program.moves)
    stages = [
        _stage_html(program, *part, max_bytes)
        for part in zip(parts, placements, parameter_bytes, strict=True)
    ]
    idle = f"{picture.timing.bubble:.0%}"
    body = [
        numbers(
            (
                (f"{len(placements)}", "stages"),
                (f"{table.micro_batches}", "micro-batches"),
                (idle, "of the time idle, on paper"),
                (bytes_text(moved_bytes), "moved forward for each micro-batch"),
                (bytes_text(max(parameter_bytes, default=0)), "parameters on a rank, at most"),
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


def _stage_html(
    program: StagesProgram,
    part: ProgramPart,
    placement: Placement,
    parameter_bytes: int,
    max_bytes: int,
) -> str:
    """Return the HTML of one stage: its moves and lines, in order.

    ``parameter_bytes`` are those of its parameters, and ``max_bytes`` those of the largest value of
    the program, which has the longest bar.
    """
    rows = [
        _move_html(program, move, f"from stage {move.src}", max_bytes) for move in part.entering
    ]
    last_source = ""
    for line in part.lines:
        if line.where != last_source:
            last_source = line.where
            source = escape(f"{short_site(last_source)}  {source_line(last_source)}")
            rows.append(f"<code class=at title='{source}'>{source}</code>")
        rows.append(_line_html(program, line, max_bytes))
        for i in line.outs:
            rows += [
                _move_html(program, move, f"to stage {move.dst}", max_bytes)
                for move in part.leaving.get(i, ())
            ]
    rows += [f"<div class=step><code>backward %{i}</code></div>" for i in part.losses]
    return (
        f"<section><h3>stage {part.stage}</h3><p class=note>{escape(placement)}"
        f"<br>parameters: {bytes_text(parameter_bytes)} on a rank</p>{''.join(rows)}</section>"
    )


def _line_html(program: StagesProgram, line: ProgramLine, max_bytes: int) -> str:
    outs = ", ".join(f"%{i}" for i in line.outs) or "_"
    keywords = [f"{k}={v!r}" for k, v in line.kwargs.items() if v is not None]
    arguments = [*map(repr, line.args), *keywords]
    text = f"{outs} = {line.name}({', '.join(arguments)})"
    tag = " <span class='tag plain'>plain</span>" if line.stage is None else ""
    outputs = [program.values[i] for i in line.outs]
    layouts = ", ".join(layout_html(_layout(value)) for value in outputs[:2])
    kind = "<b>" if line.is_module else ""
    return (
        f"<div class=step><code title='{escape(text)}'>{kind}{escape(text)}"
        f"{kind and '</b>'}</code><span>{layouts}{tag}</span>"
        f"{bar(sum(map(_shard_bytes, outputs)), max_bytes)}</div>"
    )


def _move_html(program: StagesProgram, move: StageTransfer, direction: str, max_bytes: int) -> str:
    source, result = program.values[move.source], program.values[move.out]
    return (
        f"<div class='step moves'><code>%{move.out} = move %{move.source} {direction}</code>"
        f"<span>{layout_html(_layout(source))} &rarr; {layout_html(_sbp(result))}</span>"
        f"{bar(_tensor_bytes(source), max_bytes, 'sent')}</div>"
    )


def _layout(value: ProgramValue) -> str:
    return layout_text(value.spec, value.dtype, value.shape)


def _sbp(value: ProgramValue) -> str:
    return "" if value.spec is None else sbp_text(value.spec)


def _tensor_bytes(value: ProgramValue) -> int:
    """Return the bytes of the whole tensor."""
    return math.prod(value.shape) * value.dtype.itemsize


def _shard_bytes(value: ProgramValue) -> int:
    """Return the bytes that the first rank holds of a value."""
    return _tensor_bytes(value) if value.spec is None else _first_shard_bytes(value.spec)


def _first_shard_bytes(spec: TensorSpec) -> int:
    """Return the bytes of the first rank's shard, which is the largest of all shards."""
    return math.prod(spec.local_shape((0,) * spec.placement.ndim)) * spec.dtype.itemsize


def _parameter_bytes(modules: Iterable[Any], stages: int) -> list[int]:
    """Return the bytes of the parameters on the first rank of each of ``stages`` stages."""
    bytes_by_id: list[dict[int, int]] = [{} for _ in range(stages)]
    for module in modules:
        stage = stage_of(module)
        if stage is not None:
            for p in module.parameters():
                nbytes = p.numel() * p.dtype.itemsize
                spec = p._spec if is_global(p) else None
                # By identity: a parameter that a stage uses twice is counted once.
                bytes_by_id[stage.index][id(p)] = (
                    nbytes if spec is None else _first_shard_bytes(spec)
                )
    return [sum(each.values()) for each in bytes_by_id]
