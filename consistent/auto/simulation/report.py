"""Report of a simulated step: its time, memory and bytes sent, and what limits its speed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mirrored.readable import escape_invisible, on_one_line

from ...drawing.files import write
from ...drawing.words import seconds_text
from ..machines import Machine
from .log import Log, Mark, Message, ScheduleEvent
from .peak_memory import MEMORY_KINDS, Peak, peaks
from .timeline import ACTIONS, Timeline, Track, timeline
from .trace import trace_text


@dataclass
class SimulatedStep:
    """Time, memory and bytes of a simulated step.

    The simulated ranks are called followed: one per placement (such as that of a pipeline stage),
    or the rank that ``simulate(rank=...)`` names. ``print(step)`` shows the report,
    ``step.save("step.html")`` writes a page, and ``step.save_trace("step.json")`` writes a trace
    for Perfetto.

    Args:
        seconds: seconds of one step, by the slowest rank.
        tflops: 1e12 operations per second of one rank, recomputation included; the mean over the
            followed ranks.
        peaks: followed rank -> the most memory that it holds.
        bytes: "inside" and "between" hosts -> the most bytes that a followed rank sends.
        bytes_of: followed rank -> bytes that it sends.
        sent: "inside" and "between" hosts -> followed rank -> bytes that it sends.
        timeline: what each followed rank does at which time.
        read: line -> how many values the program read there, which were taken for 0.
    """

    machine: Machine
    ranks: int
    seconds: float
    tflops: float
    peaks: dict[int, Peak]
    bytes: dict[str, int]
    bytes_of: dict[int, int]
    sent: dict[str, dict[int, int]]
    timeline: Timeline
    read: dict[str, int]
    events: int = field(repr=False, default=0)

    @property
    def peak_bytes(self) -> int:
        """The most memory that a rank holds."""
        return max((peak.bytes for peak in self.peaks.values()), default=0)

    @property
    def slowest(self) -> Track:
        """Timeline of the slowest rank, which is the one that waits least for other stages."""
        return max(self.timeline.tracks.values(), key=lambda t: (t.now - t.idle, -t.rank))

    @property
    def limit(self) -> str:
        """Sentence that names what limits the speed of the step."""
        track, total = self.slowest, self.seconds
        shares = {
            "compute": track.compute / total,
            "boxing that nothing is done beside": track.exposed / total,
            "waiting for other stages": track.idle / total,
        }
        python_share = max(0.0, 1 - sum(shares.values()))
        if python_share > max(shares.values()):
            return (
                f"The device waits for Python in {python_share:.0%} of the step: its ops are too "
                "small."
            )
        name, share = max(shares.items(), key=lambda item: item[1])
        seconds_by_label: dict[str, float] = {}
        kind = "compute" if name == "compute" else "boxing"
        for span in track.spans:
            label = f"{span.name} at {span.where or 'backward'}"
            if kind == "compute" and span.kind in ACTIONS:
                label = f"the {ACTIONS[span.kind]} {span.name.partition(' ')[2]}"
            elif span.kind != kind:
                continue
            seconds_by_label[label] = seconds_by_label.get(label, 0.0) + span.end - span.begin
        costliest = ""
        if seconds_by_label and not name.startswith("waiting"):
            label, seconds = max(seconds_by_label.items(), key=lambda item: item[1])
            costliest = f", the most of it ({seconds / total:.0%}) in {label}"
        return f"The step is held back by {name}, {share:.0%} of it{costliest}."

    def __str__(self) -> str:
        track, name = self.slowest, on_one_line(self.machine.name)
        rows = [
            f"{name}, {self.ranks} ranks: {seconds_text(self.seconds)} a step, "
            f"{self.tflops:.3g} TFLOP/s a rank",
            f"  compute {seconds_text(track.compute)}, "
            f"exposed boxing {seconds_text(track.exposed)}, "
            f"boxing beside compute {seconds_text(track.hidden)}",
        ]
        if self.timeline.schedule:
            rows.append(
                f"  {self.timeline.schedule}: stages stand idle {self.timeline.bubble:.1%} of it"
            )
        rows.append(
            f"  sent by a rank: {self.bytes['inside']:,} bytes inside its host, "
            f"{self.bytes['between']:,} between hosts"
        )
        for rank, peak in sorted(self.peaks.items()):
            parts = ", ".join(
                f"{k} {mib_text(peak.kinds[k])}" for k in MEMORY_KINDS if k in peak.kinds
            )
            rows.append(f"  rank {rank}: at most {mib_text(peak.bytes)} ({parts})")
        rows.append(f"  {self.limit}")
        if self.read:
            read_lines = ", ".join(self.read)
            rows.append(f"  values that were read and taken for 0: {read_lines}")
        return escape_invisible("\n".join(rows))

    def html(self) -> str:
        """Return the step as one self-contained HTML page."""
        from .page import page  # page.py imports this module

        return page(self)

    def save(self, path: str | Path) -> Path:
        """Write the page to ``path``, creating folders as needed."""
        return write(path, self.html())

    def save_trace(self, path: str | Path) -> Path:
        """Write the step as a Chrome trace, which Perfetto and chrome://tracing show."""
        return write(path, trace_text(self.timeline))


def report(log: Log, machine: Machine, ranks: int, kinds: Mapping[int, str]) -> SimulatedStep:
    """Return the report of the last step in ``log``, on a world of ``ranks`` ranks of ``machine``.

    ``kinds`` maps the number of a memory that lasts between steps to its kind, such as
    "parameters".
    """
    begin, end = _last_step(log.events)
    events = log.events[begin:end]
    step_timeline = timeline(events, machine)
    if not step_timeline.tracks:
        raise RuntimeError(
            "simulate: nothing ran, so there is no step to report.\n"
            "  Call the model inside the `with` block."
        )
    seconds = step_timeline.seconds
    tracks = list(step_timeline.tracks.values())
    flops = sum(t.flops for t in tracks) / len(tracks)
    sent = _bytes_sent(events, machine)
    return SimulatedStep(
        machine,
        ranks,
        seconds,
        flops / seconds / 1e12 if seconds else 0.0,
        peaks(log.events[:end], begin, kinds),
        {link: max(counts.values(), default=0) for link, counts in sent.items()},
        dict(sum(sent.values(), Counter[int]())),
        {link: dict(counts) for link, counts in sent.items()},
        step_timeline,
        dict(log.read),
        len(log.events),
    )


def _last_step(events: list[Any]) -> tuple[int, int]:
    """Return the indices of the events at which the last step begins and ends.

    A step lasts from the end of the previous optimizer step to the end of its own, a whole period.
    With fewer than two optimizer steps, it begins with the first forward and ends with the program.
    """
    steps = [i + 1 for i, e in enumerate(events) if isinstance(e, Mark) and e.what == "step"]
    if len(steps) > 1:
        # Whole periods contain what comes between steps, such as gradients set to zero.
        return steps[-2], steps[-1]
    forwards = (i for i, e in enumerate(events) if isinstance(e, Mark) and e.what == "forward")
    return next(forwards, 0), len(events)


def _bytes_sent(events: list[Any], machine: Machine) -> dict[str, Counter[int]]:
    """Return the bytes that each rank sends over links inside its host and between hosts.

    The result maps "inside" and "between" to a counter of bytes by rank.
    """
    sums = {"inside": Counter[int](), "between": Counter[int]()}

    def add(messages: list[Any], times: int) -> None:
        for e in messages:
            # An asynchronous message counts where it begins, not again where it is waited for.
            if isinstance(e, Message) and not e.wait:
                hosts = {r // machine.ranks_per_host for r in e.ranks}
                sums["inside" if len(hosts) == 1 else "between"][e.rank] += e.bytes * times

    add(events, 1)
    for e in events:
        if isinstance(e, ScheduleEvent):
            last = e.run.table.micro_batches - 1
            for (_, _, is_last), part in e.run.action_events.items():
                # Only the first and the last micro-batch were followed; those between repeat the
                # first.
                add(part.events, 1 if is_last else last)
    return sums


def mib_text(value: float) -> str:
    """Return ``value`` as text in MiB, or in GiB from 8 GiB on."""
    return f"{value / 2**20:,.1f} MiB" if value < 2**33 else f"{value / 2**30:,.1f} GiB"
