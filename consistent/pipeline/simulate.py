"""Simulate a schedule: when each action runs, and for how long placements are idle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .table import ACTION_KINDS, Action, Schedule

# A backward is as long as two forwards, and its halves are equally long.
SECONDS = {"F": 1.0, "B": 2.0, "I": 1.0, "W": 1.0}


def _default_seconds(action: Action) -> float:
    """Return the duration of an action: a forward takes a second, and a backward two."""
    return SECONDS[action.kind]


def _instant_sending(earlier: Action, action: Action) -> float:
    """Return 0: sending a result takes no time."""
    return 0.0


@dataclass(frozen=True)
class ScheduleTiming:
    """Result of ``simulate_schedule``: the times of the actions of a schedule, and the idle share.

    Args:
        times: action -> (begin, end) in seconds.
        seconds: the time of the whole schedule.
        bubble: the share of the time in which placements are idle, 0 to 1.
    """

    times: dict[Action, tuple[float, float]]
    seconds: float
    bubble: float


def simulate_schedule(
    table: Schedule,
    seconds: Callable[[Action], float] = _default_seconds,
    send_seconds: Callable[[Action, Action], float] = _instant_sending,
) -> ScheduleTiming:
    """Simulate ``table``: each placement runs its actions in order, as soon as inputs are there.

    Args:
        table: the schedule.
        seconds: (action) -> its duration; by default a backward takes as long as two forwards.
        send_seconds: (action, later action) -> seconds from the end of the first until the second
            has its result; by default 0.

    Raises:
        ValueError: an action waits for one that never runs, as when actions wait in a circle.
    """
    times: dict[Action, tuple[float, float]] = {}
    positions, clock = [0] * len(table.lines), [0.0] * len(table.lines)
    busy_seconds, progressed, halves = 0.0, True, _first_halves(table)
    while progressed:
        progressed = False
        for k, line in enumerate(table.lines):
            while positions[k] < len(line):
                action = line[positions[k]]
                needs = _dependencies(action, table.stages, halves)
                if any(need not in times for need in needs):
                    break
                arrivals = [times[need][1] + send_seconds(need, action) for need in needs]
                begin, duration = max([clock[k], *arrivals]), seconds(action)
                clock[k] = begin + duration
                times[action] = begin, clock[k]
                busy_seconds += duration
                positions[k] += 1
                progressed = True
    _check_done(table, positions, halves)
    total = max(clock, default=0.0)
    return ScheduleTiming(
        times, total, 1 - busy_seconds / (total * len(table.lines)) if total else 0.0
    )


def _check_done(table: Schedule, done_counts: Sequence[int], halves: set[Action]) -> None:
    """Raise if a line has more actions than its count in ``done_counts``.

    ``halves`` is the result of ``_first_halves``.

    Raises:
        ValueError: the message says for what the next action of the line waits.
    """
    for line, count in zip(table.lines, done_counts, strict=True):
        if count < len(line):
            needs = ", ".join(map(str, _dependencies(line[count], table.stages, halves)))
            raise ValueError(
                f"schedule: {table.name!r} stops before {line[count]}, which waits for what never "
                f"comes: {needs}."
            )


def _first_halves(table: Schedule) -> set[Action]:
    """Return the actions that compute only the first half of a backward (kind "I").

    A stage whose next stage has such an action waits for it instead of the whole backward.
    """
    return {action for line in table.lines for action in line if action.kind == "I"}


def _dependencies(action: Action, stages: int, halves: set[Action]) -> list[Action]:
    """Return the actions whose results ``action`` needs, on any placement.

    A forward needs that of the stage before, and a backward needs its own forward and the backward,
    or the first half, of the next stage.
    """
    kind, stage, m = action
    if kind == "F":
        return [Action("F", stage - 1, m)] if stage else []
    if kind == "W":
        return [Action("I", stage, m)]
    needed = [Action("F", stage, m)]
    if stage + 1 < stages:
        half = Action("I", stage + 1, m)
        needed.append(half if half in halves else Action("B", stage + 1, m))
    return needed


def check_schedule(table: Schedule) -> None:
    """Raise if a schedule is not complete, before it is run.

    Raises:
        ValueError: a stage does not run every micro-batch once forward and once backward on its own
            placement, or an action waits for one that never runs.
    """
    for stage in range(table.stages):
        actions = [a for a in table.lines[table.line_of[stage]] if a.stage == stage]
        done = {
            kind: sorted(a.micro_batch for a in actions if a.kind == kind) for kind in ACTION_KINDS
        }
        all_micro_batches = list(range(table.micro_batches))
        is_complete = (
            done["F"] == all_micro_batches and sorted(done["B"] + done["I"]) == all_micro_batches
        )
        if not is_complete or done["I"] != done["W"]:
            raise ValueError(
                f"schedule: {table.name!r} of torch.distributed.pipelining does not run stage "
                f"{stage} once for each of {table.micro_batches} micro-batches: {done}."
            )
    simulate_schedule(table)
