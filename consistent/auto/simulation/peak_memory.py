"""Computation of the peak memory of each simulated rank in a step, by kind of memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...pipeline.run import RECEIVE_AHEAD
from .log import MemoryEvent, ScheduleEvent
from .stages import ActionEvents, SimulatedSchedule

MEMORY_KINDS = ("parameters", "gradients", "optimizer", "activations", "boxing")


@dataclass
class Peak:
    """Bytes that a rank holds at its peak, in total and by kind (one of ``MEMORY_KINDS``)."""

    bytes: int = 0
    kinds: dict[str, int] = field(default_factory=dict)


def peaks(events: Sequence[Any], begin: int, kinds: Mapping[int, str]) -> dict[int, Peak]:
    """Return rank -> its peak memory, from event number ``begin`` on.

    Args:
        events: all events of the simulation, since earlier ones allocate memory that is in use in
            the step.
        kinds: number of a memory that lasts between steps -> its kind, such as "parameters".
    """
    peak_of = _peak_of_ranks(events, begin)
    ranks_at: dict[int, list[int]] = {}
    for rank, (_, index, _, _) in peak_of.items():
        ranks_at.setdefault(index, []).append(rank)
    # A second pass collects the memory that is alive at each peak.
    live: dict[int, dict[int, MemoryEvent]] = {}
    result: dict[int, Peak] = {}
    for i, event in enumerate(events):
        if isinstance(event, MemoryEvent):
            rank_live = live.setdefault(event.rank, {})
            if event.bytes > 0:
                rank_live[event.number] = event
            else:
                rank_live.pop(event.number, None)
        for rank in ranks_at.get(i, ()):
            total, _, kept, grads = peak_of[rank]
            result[rank] = Peak(total, _bytes_by_kind(live.get(rank, {}), kinds, kept, grads))
    return result


def _peak_of_ranks(events: Sequence[Any], begin: int) -> dict[int, tuple[int, int, int, int]]:
    """Return for each rank its peak memory as (bytes, index, kept, grads).

    ``bytes`` are in use after event number ``index``. If that event is a pipeline schedule,
    ``kept`` and ``grads`` are the bytes of activations and gradients inside it; otherwise 0.
    """
    held: Counter[int] = Counter()
    peak_of: dict[int, tuple[int, int, int, int]] = {}

    def update_peak(rank: int, i: int, kept: int = 0, grads: int = 0) -> None:
        total = held[rank] + kept + grads
        if rank not in peak_of or total > peak_of[rank][0]:
            peak_of[rank] = total, i, kept, grads

    for i, event in enumerate(events):
        if isinstance(event, MemoryEvent):
            held[event.rank] += event.bytes
            if i >= begin:
                update_peak(event.rank, i)
        elif isinstance(event, ScheduleEvent) and i >= begin:
            for rank, (kept, grads) in schedule_peaks(event.run).items():
                update_peak(rank, i, kept, grads)
        if i == begin:
            for rank in held:
                update_peak(rank, i)
    return peak_of


def _bytes_by_kind(
    live: Mapping[int, MemoryEvent], kinds: Mapping[int, str], kept: int, grads: int
) -> dict[str, int]:
    sums: Counter[str] = Counter(activations=kept, gradients=grads)
    for number, event in live.items():
        sums[kinds.get(number, "boxing" if event.message else "activations")] += event.bytes
    return {kind: sums[kind] for kind in MEMORY_KINDS if sums[kind]}


def schedule_peaks(run: SimulatedSchedule) -> dict[int, tuple[int, int]]:
    """Return rank -> (activation bytes, gradient bytes) when their sum is largest in a schedule.

    Activation bytes are activations kept for backward, memory in use only within an action (such as
    one forward), and messages for later actions that arrive during it.
    """
    most_of: dict[int, tuple[int, int]] = {}
    gradient_bytes = {stage: _gradient_bytes(run, stage) for stage in range(run.table.stages)}
    highest_bytes = {key: peak_bytes(part) for key, part in run.action_events.items()}
    kept_bytes = {key: net_bytes(part) for key, part in run.action_events.items() if key[0] == "F"}
    for line in run.table.lines:
        kept = grads = 0
        started: set[int] = set()
        for k, action in enumerate(line):
            stage = action.stage
            last = action.micro_batch == _last_micro_batch(run)
            early_bytes = sum(
                run.events_of(later).received for later in line[k + 1 : k + 1 + RECEIVE_AHEAD]
            )
            candidates = [(kept + early_bytes + highest_bytes[action.kind, stage, last], grads)]
            forward_bytes = kept_bytes["F", stage, last]
            # The first backward of a stage allocates its gradients; later ones add to them.
            if action.kind in "BW" and stage not in started:
                started.add(stage)
                grads += gradient_bytes[stage]
            kept += {"F": forward_bytes, "I": 0}.get(action.kind, -forward_bytes)
            candidates.append((kept, grads))
            rank = run.ranks[stage]
            most_of[rank] = max(most_of.get(rank, (0, 0)), *candidates, key=sum)
    return most_of


def _last_micro_batch(run: SimulatedSchedule) -> int:
    return run.table.micro_batches - 1


def _gradient_bytes(run: SimulatedSchedule, stage: int) -> int:
    """Return the bytes of gradients that the first backward of a stage allocates.

    They are the bytes in use after all actions of its first micro-batch, but not before.
    """
    is_last = _last_micro_batch(run) == 0
    kinds = [kind for kind in "FBIW" if (kind, stage, is_last) in run.action_events]
    return max(0, sum(net_bytes(run.action_events[kind, stage, is_last]) for kind in kinds))


def net_bytes(part: ActionEvents) -> int:
    """Return the bytes that the events ``part`` allocate, minus those that they free."""
    return sum(e.bytes for e in part.events if isinstance(e, MemoryEvent))


def peak_bytes(part: ActionEvents) -> int:
    """Return the peak of the memory in use during the events ``part``, minus that before them."""
    now = most = 0
    for e in part.events:
        if isinstance(e, MemoryEvent):
            now += e.bytes
            most = max(most, now)
    return most
