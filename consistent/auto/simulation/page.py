"""Self-contained HTML page that reports a simulated step.

It shows what limits the speed of the step, memory, bytes by link, where the time goes, and the
timeline of each simulated rank.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ...drawing.pages.canvas import MOST_DRAWN, Drawn, canvas
from ...drawing.pages.html import cell, escaped, frame, number, numbers, search, stacks, table
from ...drawing.words import seconds_text, short_site
from ...spec.bytes_text import bytes_text
from .peak_memory import KINDS
from .timeline import ACTIONS, Span, Track

SimulatedStep = Any  # of report.py, which imports this file

_COLOURS = ("--bar", "--back", "--half", "--rest", "--box")  # of memory, in the order of KINDS
_TIMES = {
    "compute": "--bar",
    "boxing that it waits for": "--box",
    "bubble: waiting for other stages": "--rest",
    "waiting for Python": "--half",
}
_LINKS = {"inside its host": "--bar", "between hosts": "--box"}
_ACTIONS = {"F": "--bar", "B": "--back", "I": "--half", "W": "--rest"}
_LANES = {"compute": "--bar", "boxing": "--box", "wire": "--faint"}
_MOST_RANKS = 16  # ranks whose timelines are drawn


def page(step: SimulatedStep) -> str:
    """Return the HTML page of ``step``."""
    body = [_numbers(step), _times(step), _memory(step), _links(step), _dearest(step), _drawn(step)]
    lead = (
        f"{step.ranks:,} ranks of {step.machine.name} take {seconds_text(step.seconds)} for a "
        f"step. {step.limit}"
    )
    return frame("A simulated step", lead, "\n".join([*body, _read(step)]))


def _numbers(step: SimulatedStep) -> str:
    room = step.machine.memory_bytes
    shown = [
        (seconds_text(step.seconds), "a step"),
        (f"{step.tflops:.3g}", "TFLOP/s a rank"),
        (bytes_text(step.peak_bytes), f"at most on a rank, of {bytes_text(room)}"),
        (bytes_text(step.bytes["inside"]), "sent inside hosts by a rank"),
        (bytes_text(step.bytes["between"]), "sent between hosts by a rank"),
    ]
    if step.timeline.schedule:
        shown.append((f"{step.timeline.bubble:.1%}", f"bubble of {step.timeline.schedule}"))
    return numbers(shown)


def _tracks(step: SimulatedStep) -> list[Track]:
    return [track for _, track in sorted(step.timeline.tracks.items())]


def _times(step: SimulatedStep) -> str:
    rows = []
    for track in _tracks(step):
        spent = (track.compute, track.exposed, track.idle)
        values = dict(zip(_TIMES, (*spent, max(0.0, step.seconds - sum(spent))), strict=True))
        beside = f", {seconds_text(track.hidden)} boxing beside it" if track.hidden else ""
        share = track.compute / step.seconds if step.seconds else 0.0
        text = f"{seconds_text(track.compute)} compute, {share:.0%}{beside}"
        rows.append((f"rank {track.rank}", values, text))
    return (
        "<h2>What holds it back</h2><p class=note>The step of each rank that was followed; the "
        f"others do the same as one of these.</p>{stacks(_TIMES, rows, step.seconds, seconds_text)}"
    )


def _memory(step: SimulatedStep) -> str:
    room = step.machine.memory_bytes
    rows = [
        (f"rank {rank}", dict(peak.kinds), f"{bytes_text(peak.bytes)}, {peak.bytes / room:.0%}")
        for rank, peak in sorted(step.peaks.items())
    ]
    over = [rank for rank, peak in step.peaks.items() if peak.bytes > room]
    tag = f" <span class=tag>does not fit on rank {min(over)}</span>" if over else ""
    colours: dict[str, str] = dict(zip(KINDS, _COLOURS, strict=True))
    return (
        f"<h2>Memory at its peak{tag}</h2><p class=note>By what it is; the share is that of a "
        f"device's {bytes_text(room)}. What the allocator wastes between blocks is not in it.</p>"
        + stacks(colours, rows, max(step.peak_bytes, 1), bytes_text)
    )


def _links(step: SimulatedStep) -> str:
    if not any(step.bytes_of.values()):
        return ""
    ways = dict(zip(_LINKS, (step.sent["inside"], step.sent["between"]), strict=True))
    rows = [
        (f"rank {rank}", {name: float(of.get(rank, 0)) for name, of in ways.items()}, bytes_text(n))
        for rank, n in sorted(step.bytes_of.items())
    ]
    longest = max(step.bytes_of.values())
    return f"<h2>Bytes by link</h2>{stacks(_LINKS, rows, longest, bytes_text)}"


def _dearest(step: SimulatedStep) -> str:
    """Return the HTML table of what takes most of the time of the slowest rank."""
    found: dict[tuple[str, str, str], list[float]] = {}
    for span in step.slowest.spans:
        if span.kind in _LANES:
            key = span.kind, _short(span.name), span.where
        else:
            key = "stage", f"{ACTIONS[span.kind]} {span.name.partition(' ')[2]}", ""
        sums = found.setdefault(key, [0, 0.0, 0])
        for i, value in enumerate((1, span.end - span.begin, span.bytes)):
            sums[i] += value
    boxes, rows = set(), []
    ordered = sorted(found.items(), key=lambda item: -item[1][1])
    for i, ((kind, name, where), (count, seconds, sent)) in enumerate(ordered):
        if kind in ("boxing", "wire"):
            boxes.add(i)
        rows.append(
            [
                cell("beside compute" if kind == "wire" else kind),
                cell(f"<code>{escaped(name)}</code>"),
                number(int(count), f"{int(count):,}"),
                f'<td class=n data-n="{seconds}">{seconds_text(seconds)}</td>',
                f'<td class=n data-n="{seconds}">{escaped(_share(seconds / step.seconds))}</td>',
                number(int(sent), bytes_text(sent) if sent else ""),
                cell(f"<span title='{escaped(where)}'>{escaped(short_site(where))}</span>"),
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


def _drawn(step: SimulatedStep) -> str:
    tracks = _tracks(step)[:_MOST_RANKS]
    lanes: list[tuple[str, str]] = []
    events: list[Drawn] = []
    for track in tracks:
        spans = [*track.spans, *_bubbles(track, step)]
        met = {_lane(span) for span in spans}
        mine = [name for name in ("schedule", *_LANES) if name in met]
        at = {name: len(lanes) + i for i, name in enumerate(mine)}
        lanes += [(f"rank {track.rank} {name}", _LANES.get(name, "--bar")) for name in mine]
        events += [(at[_lane(span)], *_event(span)) for span in spans]
    left = len(events) - MOST_DRAWN
    rest = "" if left <= 0 else f" {left:,} later events are left out; a trace holds them."
    more = len(step.timeline.tracks) - len(tracks)
    rest += f" {more} other ranks were followed, and are not drawn." if more else ""
    note = (
        "When each followed rank computes, waits for a boxing, or boxes beside its computing "
        f"(wire). Pale parts of a schedule are its bubble.{rest}"
    )
    events.sort(key=lambda event: event[2])
    return canvas("Timeline", note, lanes, events[:MOST_DRAWN])


def _lane(span: Span) -> str:
    return span.kind if span.kind in _LANES else "schedule"


def _event(span: Span) -> Drawn:
    detail = bytes_text(span.bytes) if span.bytes else ""
    made = (
        _short(span.name),
        round(span.begin * 1e6, 3),
        round((span.end - span.begin) * 1e6, 3),
        short_site(span.where),
        detail,
    )
    if span.kind in _LANES:
        return made
    return (*made, _ACTIONS.get(span.kind, "--line"))


def _share(share: float) -> str:
    return f"{share:.1%}" if share >= 0.0005 else "<0.1%"


def _short(name: str) -> str:
    """Return ``mm`` for ``aten.mm.default``."""
    return name[5:].rpartition(".")[0] if name.startswith("aten.") else name


def _bubbles(track: Track, step: SimulatedStep) -> Iterator[Span]:
    """Yield the idle spans in which a rank waits for other stages of a pipeline schedule."""
    every = [s for t in step.timeline.tracks.values() for s in t.spans if s.kind in _ACTIONS]
    if not every or not any(span.kind in _ACTIONS for span in track.spans):
        return
    now = min(span.begin for span in every)
    for span in sorted(track.spans, key=lambda span: span.begin):
        if span.kind in _ACTIONS:
            if span.begin - now > 1e-9 * step.seconds:
                yield Span(track.rank, "bubble", "bubble", now, span.begin)
            now = max(now, span.end)
    end = max(span.end for span in every)
    if end - now > 1e-9 * step.seconds:
        yield Span(track.rank, "bubble", "bubble", now, end)


def _read(step: SimulatedStep) -> str:
    if not step.read:
        return ""
    said = ", ".join(f"<code>{escaped(line)}</code>" for line in step.read)
    return f"<p class=note>Values that were read and taken for 0: {said}</p>"
