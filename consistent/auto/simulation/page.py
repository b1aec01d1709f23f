"""Self-contained HTML page that reports a simulated step.

It shows what limits the speed of the step, memory, bytes by link, where the time goes, and the
timeline of each simulated rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...drawing.pages.canvas import MAX_DRAWN, Drawn, canvas
from ...drawing.pages.html import cell, escape, frame, number, numbers, search, stacks, table
from ...drawing.words import seconds_text, short_site
from ...spec.bytes_text import bytes_text
from .peak_memory import MEMORY_KINDS
from .timeline import ACTIONS, Span, Track

SimulatedStep = Any  # of report.py, which imports this file

# Colours of memory, in the order of MEMORY_KINDS.
_COLOURS = ("--bar", "--back", "--half", "--rest", "--box")
_TIMES = {
    "compute": "--bar",
    "boxing that it waits for": "--box",
    "bubble: waiting for other stages": "--rest",
    "waiting for Python": "--half",
}
_LINKS = {"inside its host": "--bar", "between hosts": "--box"}
_ACTIONS = {"F": "--bar", "B": "--back", "I": "--half", "W": "--rest"}
_LANES = {"compute": "--bar", "boxing": "--box", "wire": "--faint"}
_MAX_RANKS = 16  # ranks whose timelines are drawn


def page(step: SimulatedStep) -> str:
    """Return the HTML page of ``step``."""
    body = [
        _summary_html(step),
        _times_html(step),
        _memory_html(step),
        _links_html(step),
        _costliest_html(step),
        _timeline_html(step),
    ]
    lead = (
        f"{step.ranks:,} ranks of {step.machine.name} take {seconds_text(step.seconds)} for a "
        f"step. {step.limit}"
    )
    return frame("A simulated step", lead, "\n".join([*body, _read_values_html(step)]))


def _summary_html(step: SimulatedStep) -> str:
    device_bytes = step.machine.memory_bytes
    figures = [
        (seconds_text(step.seconds), "a step"),
        (f"{step.tflops:.3g}", "TFLOP/s a rank"),
        (bytes_text(step.peak_bytes), f"at most on a rank, of {bytes_text(device_bytes)}"),
        (bytes_text(step.bytes["inside"]), "sent inside hosts by a rank"),
        (bytes_text(step.bytes["between"]), "sent between hosts by a rank"),
    ]
    if step.timeline.schedule:
        figures.append((f"{step.timeline.bubble:.1%}", f"bubble of {step.timeline.schedule}"))
    return numbers(figures)


def _sorted_tracks(step: SimulatedStep) -> list[Track]:
    return [track for _, track in sorted(step.timeline.tracks.items())]


def _times_html(step: SimulatedStep) -> str:
    rows = []
    for track in _sorted_tracks(step):
        seconds = (track.compute, track.exposed, track.idle)
        values = dict(zip(_TIMES, (*seconds, max(0.0, step.seconds - sum(seconds))), strict=True))
        hidden_text = f", {seconds_text(track.hidden)} boxing beside it" if track.hidden else ""
        share = track.compute / step.seconds if step.seconds else 0.0
        text = f"{seconds_text(track.compute)} compute, {share:.0%}{hidden_text}"
        rows.append((f"rank {track.rank}", values, text))
    return (
        "<h2>What holds it back</h2><p class=note>The step of each rank that was followed; the "
        f"others do the same as one of these.</p>{stacks(_TIMES, rows, step.seconds, seconds_text)}"
    )


def _memory_html(step: SimulatedStep) -> str:
    device_bytes = step.machine.memory_bytes
    rows = [
        (
            f"rank {rank}",
            dict(peak.kinds),
            f"{bytes_text(peak.bytes)}, {peak.bytes / device_bytes:.0%}",
        )
        for rank, peak in sorted(step.peaks.items())
    ]
    overfull = [rank for rank, peak in step.peaks.items() if peak.bytes > device_bytes]
    tag = f" <span class=tag>does not fit on rank {min(overfull)}</span>" if overfull else ""
    colours: dict[str, str] = dict(zip(MEMORY_KINDS, _COLOURS, strict=True))
    return (
        f"<h2>Memory at its peak{tag}</h2><p class=note>By what it is; the share is that of a "
        f"device's {bytes_text(device_bytes)}. What the allocator wastes between blocks is not in "
        "it.</p>" + stacks(colours, rows, max(step.peak_bytes, 1), bytes_text)
    )


def _links_html(step: SimulatedStep) -> str:
    if not any(step.bytes_of.values()):
        return ""
    bytes_by_link = dict(zip(_LINKS, (step.sent["inside"], step.sent["between"]), strict=True))
    rows = [
        (
            f"rank {rank}",
            {name: float(by_rank.get(rank, 0)) for name, by_rank in bytes_by_link.items()},
            bytes_text(n),
        )
        for rank, n in sorted(step.bytes_of.items())
    ]
    max_bytes = max(step.bytes_of.values())
    return f"<h2>Bytes by link</h2>{stacks(_LINKS, rows, max_bytes, bytes_text)}"


def _costliest_html(step: SimulatedStep) -> str:
    """Return the HTML table of what takes most of the time of the slowest rank."""
    totals: dict[tuple[str, str, str], list[float]] = {}
    for span in step.slowest.spans:
        if span.kind in _LANES:
            key = span.kind, _short_name(span.name), span.where
        else:
            key = "stage", f"{ACTIONS[span.kind]} {span.name.partition(' ')[2]}", ""
        sums = totals.setdefault(key, [0, 0.0, 0])
        for i, value in enumerate((1, span.end - span.begin, span.bytes)):
            sums[i] += value
    boxes, rows = set(), []
    ordered = sorted(totals.items(), key=lambda item: -item[1][1])
    for i, ((kind, name, where), (count, seconds, sent)) in enumerate(ordered):
        if kind in ("boxing", "wire"):
            boxes.add(i)
        rows.append(
            [
                cell("beside compute" if kind == "wire" else kind),
                cell(f"<code>{escape(name)}</code>"),
                number(int(count), f"{int(count):,}"),
                f'<td class=n data-n="{seconds}">{seconds_text(seconds)}</td>',
                f'<td class=n data-n="{seconds}">{escape(_percent(seconds / step.seconds))}</td>',
                number(int(sent), bytes_text(sent) if sent else ""),
                cell(f"<span title='{escape(where)}'>{escape(short_site(where))}</span>"),
            ]
        )
    heads = [
        ("kind", False), ("what", False), ("count", True), ("time", True), ("of the step", True),
        ("sent", True), ("where", False),
    ]  # fmt: skip
    return (
        f"<h2>Where the time of rank {step.slowest.rank} goes</h2><p class=note>The rank that "
        "stands idle least. Marked lines are boxings. What runs in backward, and what stages do, "
        "has no line.</p>"
        f"{search()}{table('lines', heads, rows, boxes)}"
    )


def _timeline_html(step: SimulatedStep) -> str:
    tracks = _sorted_tracks(step)[:_MAX_RANKS]
    lanes: list[tuple[str, str]] = []
    events: list[Drawn] = []
    for track in tracks:
        spans = [*track.spans, *_bubbles(track, step)]
        used = {_lane(span) for span in spans}
        used_lanes = [name for name in ("schedule", *_LANES) if name in used]
        lane_index = {name: len(lanes) + i for i, name in enumerate(used_lanes)}
        lanes += [(f"rank {track.rank} {name}", _LANES.get(name, "--bar")) for name in used_lanes]
        events += [(lane_index[_lane(span)], *_event(span)) for span in spans]
    omitted = len(events) - MAX_DRAWN
    omitted_text = (
        "" if omitted <= 0 else f" {omitted:,} later events are left out; a trace holds them."
    )
    other_ranks = len(step.timeline.tracks) - len(tracks)
    omitted_text += (
        f" {other_ranks} other ranks were followed, and are not drawn." if other_ranks else ""
    )
    note = (
        "When each followed rank computes, waits for a boxing, or boxes beside its computing "
        f"(wire). Pale parts of a schedule are its bubble.{omitted_text}"
    )
    events.sort(key=lambda event: event[2])
    return canvas("Timeline", note, lanes, events[:MAX_DRAWN])


def _lane(span: Span) -> str:
    return span.kind if span.kind in _LANES else "schedule"


def _event(span: Span) -> Drawn:
    detail = bytes_text(span.bytes) if span.bytes else ""
    fields = (
        _short_name(span.name),
        round(span.begin * 1e6, 3),
        round((span.end - span.begin) * 1e6, 3),
        short_site(span.where),
        detail,
    )
    if span.kind in _LANES:
        return fields
    return (*fields, _ACTIONS.get(span.kind, "--line"))


def _percent(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _short_name(name: str) -> str:
    """Return ``mm`` for ``aten.mm.default``."""
    return name[5:].rpartition(".")[0] if name.startswith("aten.") else name


def _bubbles(track: Track, step: SimulatedStep) -> Iterator[Span]:
    """Yield the idle spans in which a rank waits for other stages of a pipeline schedule."""
    all_actions = [s for t in step.timeline.tracks.values() for s in t.spans if s.kind in _ACTIONS]
    if not all_actions or not any(span.kind in _ACTIONS for span in track.spans):
        return
    now = min(span.begin for span in all_actions)
    for span in sorted(track.spans, key=lambda span: span.begin):
        if span.kind in _ACTIONS:
            if span.begin - now > 1e-9 * step.seconds:
                yield Span(track.rank, "bubble", "bubble", now, span.begin)
            now = max(now, span.end)
    end = max(span.end for span in all_actions)
    if end - now > 1e-9 * step.seconds:
        yield Span(track.rank, "bubble", "bubble", now, end)


def _read_values_html(step: SimulatedStep) -> str:
    if not step.read:
        return ""
    lines = ", ".join(f"<code>{escape(line)}</code>" for line in step.read)
    return f"<p class=note>Values that were read and taken for 0: {lines}</p>"
