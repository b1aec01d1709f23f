"""Pipeline schedules: the order of forwards and backwards on each placement.

The tables come from ``torch.distributed.pipelining``; every rank computes the same one. The 1F1B
schedule of 4 stages and 5 micro-batches, one line for each placement, time from left to right:

```
stage 0   F0 F1 F2 F3          B0 F4 B1    B2    B3    B4
stage 1      F0 F1 F2       B0 F3 B1 F4 B2    B3    B4
stage 2         F0 F1    B0 F2 B1 F3 B2 F4 B3    B4
stage 3            F0 B0 F1 B1 F2 B2 F3 B3 F4 B4
```

F is a forward and B a backward. I and W are the two halves of a backward, which zero-bubble
schedules run separately: I computes the gradients of a stage's inputs, W those of its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from types import SimpleNamespace
from typing import Any

from ..spec.nearest import suggestion
from .simulate import check_schedule
from .table import ACTION_KINDS, Action, Schedule


@dataclass(frozen=True)
class _ScheduleKind:
    """Kind of schedule: a function that makes its table, and the stages that it needs.

    Args:
        make: (placements, stages, micro-batches) -> for each placement its actions, as torch has
            them.
        stages_per_line: stages on each placement; None for two or more.
        style: how stages are distributed over three placements: "loop" is 0 1 2 0 1 2, "v" is 0 1 2
            2 1 0.
    """

    make: Callable[[int, int, int], Sequence[Sequence[Any]]]  # lines, stages, micro-batches
    stages_per_line: int | None  # None: two or more
    style: str = "loop"  # order of placements over the stages: 0 1 2 0 1 2, or "v": 0 1 2 2 1 0


def _torch_schedules() -> Any:
    """Return the module torch.distributed.pipelining.schedules.

    It is imported at the first use, because it imports much of torch.
    """
    from torch.distributed.pipelining import schedules

    return schedules


def _torch_table(cls: str, lines: int, stages: int, count: int) -> Sequence[Sequence[Any]]:
    """Return the table that torch's schedule class ``cls`` makes.

    The class gets stubs in place of stages, which have only the attributes that it reads.

    Args:
        cls: the name of the class.
        lines: the number of distinct placements.
        stages: the number of stages.
        count: the number of micro-batches.
    """
    stub = partial(SimpleNamespace, num_stages=stages, group_size=lines, group_rank=0, submod=None)
    stage_stubs = [
        stub(stage_index=i, is_first=i == 0, is_last=False) for i in range(stages // lines)
    ]
    table = getattr(_torch_schedules(), cls)(stage_stubs, count).pipeline_order
    return [table[line] for line in range(lines)]


def _gpipe(lines: int, stages: int, count: int) -> Sequence[Sequence[Any]]:
    stub = SimpleNamespace(num_stages=stages, group_size=lines, group_rank=0, has_backward=True)
    table: Any = _torch_schedules().ScheduleGPipe(stub, count).pipeline_order
    return [table[line] for line in range(lines)]


def _one_f_one_b(lines: int, stages: int, count: int) -> Sequence[Sequence[Any]]:
    # Torch's own Schedule1F1B numbers the last stage's forwards from 1. The function behind its
    # interleaved schedules makes a correct 1F1B table.
    table = []
    for line in range(lines):
        warmup = min(lines - 1 - line, count)
        table.append(
            _torch_schedules()._get_1f1b_rank_ops(
                1,
                lines,
                warmup,
                count - warmup,
                warmup,
                line,
                lambda _, k=line: k,
                lambda _, k=line: k,
            )
        )
    return table


def _one_at_a_time(lines: int, stages: int, count: int) -> Sequence[Sequence[Any]]:
    """Return the table of the schedule "one at a time".

    One micro-batch goes forward and backward through all stages before the next begins.
    """
    return [[(line, kind, m) for m in range(count) for kind in "FB"] for line in range(lines)]


SCHEDULES: dict[str, _ScheduleKind] = {
    "gpipe": _ScheduleKind(_gpipe, 1),
    "1f1b": _ScheduleKind(_one_f_one_b, 1),
    "interleaved1f1b": _ScheduleKind(partial(_torch_table, "ScheduleInterleaved1F1B"), None),
    "loopedbfs": _ScheduleKind(partial(_torch_table, "ScheduleLoopedBFS"), None),
    "interleavedzerobubble": _ScheduleKind(
        partial(_torch_table, "ScheduleInterleavedZeroBubble"), None
    ),
    "zbvzerobubble": _ScheduleKind(partial(_torch_table, "ScheduleZBVZeroBubble"), 2, "v"),
    "dualpipev": _ScheduleKind(partial(_torch_table, "ScheduleDualPipeV"), 2, "v"),
    "one at a time": _ScheduleKind(_one_at_a_time, 1),
}


def schedule_kind(name: str) -> _ScheduleKind:
    """Return the kind of schedule called ``name``, ignoring case.

    Raises:
        ValueError: there is no such schedule.
    """
    kind = SCHEDULES.get(name.lower())
    if kind is None:
        raise ValueError(
            f"schedule: {name!r} is not known.{suggestion(name, SCHEDULES)} Give one of "
            f"{', '.join(map(repr, SCHEDULES))}."
        )
    return kind


def stages_per_line(name: str) -> int:
    """Return the number of stages that a schedule runs on each placement by default.

    It is 1 for "1f1b", and 2 for "interleaved1f1b".
    """
    return schedule_kind(name).stages_per_line or 2


def lines_of(name: str, lines: int, stages: int) -> tuple[int, ...]:
    """Return for each stage the index of the placement on which the schedule runs it.

    "interleaved1f1b" with 2 placements and 4 stages -> (0, 1, 0, 1); "zbvzerobubble" -> (0, 1, 1,
    0).

    Args:
        name: the name of the schedule.
        lines: the number of distinct placements.
        stages: the number of stages.

    Raises:
        ValueError: the schedule cannot run this number of stages on this number of placements.
    """
    kind = schedule_kind(name)
    per_line = kind.stages_per_line
    requirement = (
        f"{per_line} on each of {lines} placements" if per_line else f"2 or more on each of {lines}"
    )
    if (
        stages % lines
        or (per_line and stages != per_line * lines)
        or (per_line is None and stages < 2 * lines)
    ):
        raise ValueError(
            f"schedule: {name!r} runs {requirement}, and there are {stages} stages.\n"
            "  Cut the model at other names, or take a schedule that fits: "
            f"{', '.join(repr(n) for n, k in SCHEDULES.items() if _can_run(k, lines, stages))}."
        )
    from torch.distributed.pipelining._utils import generate_stage_to_rank_mapping

    mapping = generate_stage_to_rank_mapping(lines, stages, kind.style)
    return tuple(mapping[stage] for stage in range(stages))


def _can_run(kind: _ScheduleKind, lines: int, stages: int) -> bool:
    """Return whether a schedule can run ``stages`` stages on ``lines`` placements."""
    per_line = kind.stages_per_line
    return stages == per_line * lines if per_line else stages % lines == 0 and stages >= 2 * lines


@lru_cache(maxsize=64)
def schedule(name: str, lines: int, stages: int, micro_batches: int) -> Schedule:
    """Return the schedule ``name`` as a table of actions, after checking that it is complete.

    Args:
        name: the name of the schedule.
        lines: the number of distinct placements.
        stages: the number of stages.
        micro_batches: the number of micro-batches.

    Raises:
        ValueError: the schedule cannot run this number of stages on this number of placements, or
            cannot run this number of micro-batches.
    """
    line_of = lines_of(name, lines, stages)
    try:
        table = schedule_kind(name).make(lines, stages, micro_batches)
    except (ValueError, AssertionError) as error:
        raise ValueError(
            f"schedule: {name!r} cannot run {micro_batches} micro-batches through {stages} stages "
            f"on {lines} placements: {error}\n"
            "  Cut the batch into another number of micro-batches, or take another schedule."
        ) from error
    result = Schedule(name, tuple(_actions(line) for line in table), line_of, micro_batches)
    check_schedule(result)
    return result


def _actions(line: Sequence[Any]) -> tuple[Action, ...]:
    """Return one placement's line of torch's table as a tuple of ``Action``.

    Pauses are left out, and actions that torch overlaps follow one another.
    """
    torch_actions: list[Any] = []
    for action in line:
        if action is not None:  # None is a pause in torch's table
            torch_actions += getattr(action, "sub_actions", None) or (action,)
    fields = ((getattr(kind, "value", kind), stage, m) for stage, kind, m, *_ in torch_actions)
    return tuple(
        Action(*action_fields) for action_fields in fields if action_fields[0] in ACTION_KINDS
    )
