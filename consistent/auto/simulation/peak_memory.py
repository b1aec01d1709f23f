"""Computation of the peak memory of each simulated rank in a step, by kind of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...pipeline.run import AHEAD
from .log import Held, Scheduled
from .stages import FollowedSchedule, Part

KINDS = ("parameters", "gradients", "optimizer", "activations", "boxing")


@dataclass
class Peak:
    """Bytes that a rank holds at its peak, in total and by kind (one of ``KINDS``)."""

    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


def peaks(events: Sequence[Any], begin: int, kinds: Mapping[int, str]) -> dict[int, Peak]:
    """Return rank -> the peak of the memory that it holds, from event number ``begin`` on.

    Args:
        events: all events of the simulation, since earlier ones allocate what is held in the step.
        kinds: number of a memory that lasts between steps -> its kind, such as "parameters".
    """
    best = _highest(events, begin)
    at: dict[int, list[int]] = {}
    for rank, (_, index, _, _) in best.items():
        at.setdefault(index, []).append(rank)
    # A second pass collects the memory that is alive at each peak.
    live: dict[int, dict[int, Held]] = {}
    found: dict[int, Peak] = {}
    for i, event in enumerate(events):
        if isinstance(event, Held):
            mine = live.setdefault(event.rank, {})
            if event.bytes > 0:
                mine[event.number] = event
            else:
                mine.pop(event.number, None)
        for rank in at.get(i, ()):
            total, _, kept, grads = best[rank]
            found[rank] = Peak(total, _by_kind(live.get(rank, {}), kinds, kept, grads))
    return found


def _highest(events: Sequence[Any], begin: int) -> dict[int, tuple[int, int, int, int]]:
    """Return rank -> (bytes, index, kept, grads) at the rank's peak.

    ``index`` is the event after which the rank holds these bytes. ``kept`` and ``grads`` are how
    many of them are activations and gradients of a pipeline schedule in progress, whose events are
    not in ``events`` one by one.
    """
    now: Counter[int] = Counter()
    best: dict[int, tuple[int, int, int, int]] = {}

    def look(rank: int, i: int, kept: int = 0, grads: int = 0) -> None:
        total = now[rank] + kept + grads
        if rank not in best or total > best[rank][0]:
            best[rank] = total, i, kept, grads

    for i, event in enumerate(events):
        if isinstance(event, Held):
            now[event.rank] += event.bytes
            if i >= begin:
                look(event.rank, i)
        elif isinstance(event, Scheduled) and i >= begin:
            for rank, (kept, grads) in in_flight(event.run).items():
                look(rank, i, kept, grads)
        if i == begin:
            for rank in now:
                look(rank, i)
    return best


def _by_kind(
    live: Mapping[int, Held], kinds: Mapping[int, str], kept: int, grads: int
) -> dict[str, int]:
    sums: Counter[str] = Counter(activations=kept, gradients=grads)
    for number, event in live.items():
        sums[kinds.get(number, "boxing" if event.message else "activations")] += event.bytes
    return {kind: sums[kind] for kind in KINDS if sums[kind]}


def in_flight(run: FollowedSchedule) -> dict[int, tuple[int, int]]:
    """Return rank -> (activation bytes, gradient bytes) when their sum is largest in a schedule.

    Activation bytes are those that forwards keep until their backward, those that are held only
    within an action, and messages for the next actions that arrive during an action.
    """
    found: dict[int, tuple[int, int]] = {}
    left = {stage: _gradients(run, stage) for stage in range(run.table.stages)}
    high = {key: highest(part) for key, part in run.parts.items()}
    after = {key: net(part) for key, part in run.parts.items() if key[0] == "F"}
    for line in run.table.lines:
        kept = grads = 0
        met: set[int] = set()
        for k, action in enumerate(line):
            stage = action.stage
            last = action.micro_batch == _last(run)
            early = sum(run.part(later).received for later in line[k + 1 : k + 1 + AHEAD])
            most = [(kept + early + high[action.kind, stage, last], grads)]
            mine = after["F", stage, last]
            # The first backward of a stage allocates its gradients; later ones add to them.
            if action.kind in "BW" and stage not in met:
                met.add(stage)
                grads += left[stage]
            kept += {"F": mine, "I": 0}.get(action.kind, -mine)
            most.append((kept, grads))
            rank = run.ranks[stage]
            found[rank] = max(found.get(rank, (0, 0)), *most, key=sum)
    return found


def _last(run: FollowedSchedule) -> int:
    return run.table.micro_batches - 1


def _gradients(run: FollowedSchedule, stage: int) -> int:
    """Return the bytes of gradients that the first backward of a stage allocates.

    They are what is held after all actions of its first micro-batch, but not before.
    """
    first = _last(run) == 0
    kinds = [kind for kind in "FBIW" if (kind, stage, first) in run.parts]
    return max(0, sum(net(run.parts[kind, stage, first]) for kind in kinds))


def net(part: Part) -> int:
    """Return how many more bytes are held after ``part`` than before; negative if it frees more."""
    return sum(e.bytes for e in part.events if isinstance(e, Held))


def highest(part: Part) -> int:
    """Return the peak of the bytes that ``part`` holds in addition to those held before it."""
    now = most = 0
    for e in part.events:
        if isinstance(e, Held):
            now += e.bytes
            most = max(most, now)
    return most
