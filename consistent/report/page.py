"""HTML page of a report: summary, advice, bytes by op, layouts along the program, and timeline."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from ..drawing.pages.canvas import MAX_DRAWN, canvas
from ..drawing.pages.html import (
    bars,
    boxing_html,
    cell,
    escape,
    frame,
    layout_html,
    number,
    numbers,
    search,
    table,
)
from ..drawing.words import short_site, source_line, times
from ..spec.bytes_text import bytes_text
from .advice import Advice
from .lines import Line
from .text import EMPTY
from .timeline import Timeline

_LANES = {
    "step": ("step", "--faint"),
    "op": ("compute", "--bar"),
    "boxing": ("boxing", "--box"),
    "backward": ("backward", "--back"),
}
_MAX_ADVICE = 20


def page(
    lines: Sequence[Line],
    advice: Sequence[Advice],
    timeline: Timeline | None,
    summary: str,
) -> str:
    """Return the HTML page of a report.

    Args:
        lines: the lines of the report.
        advice: its advice, largest first.
        timeline: its times; None if none were taken.
        summary: the sentences at the head of the page.
    """
    if lines:
        parts = [_numbers(lines), _advice(advice), _bars(lines), _program(lines), _times(timeline)]
    else:
        parts = [f"<p>{_mark_up(EMPTY)}</p>"]
    return frame("What ran", summary, "\n".join(parts))


def _numbers(lines: Sequence[Line]) -> str:
    whole = len({line.op for line in lines if line.whole})
    steps = sum(line.count for line in lines if line.compiled)
    between = sum(line.between for line in lines)
    return numbers(
        (
            (f"{sum(line.count for line in lines) - steps:,}", "ops ran"),
            *(((f"{steps:,}", "compiled steps"),) if steps else ()),
            (f"{sum(sum(line.boxings.values()) for line in lines):,}", "boxings"),
            (bytes_text(sum(line.nbytes for line in lines)), "sent by the busiest rank"),
            *(((bytes_text(between), "sent from host to host by all ranks"),) if between else ()),
            (f"{whole}", "ops ran whole on every rank"),
        )
    )


def _advice(advice: Sequence[Advice]) -> str:
    if not advice:
        return ""
    items = "".join(
        f"<li><code>{escape(each.op)}</code> at <code title='{escape(each.site)}'>"
        f"{escape(short_site(each.site))}</code> {_mark_up(each.moves)}. "
        f"<span class=do>{_mark_up(each.instead)}</span></li>"
        for each in advice[:_MAX_ADVICE]
    )
    more = len(advice) - _MAX_ADVICE
    rest = f"<p class=note>And {more} more, which move less.</p>" if more > 0 else ""
    return (
        "<h2>Advice</h2><p class=note>From the layouts that each op accepts. What a change costs "
        "where the operand is made, and where else it is used, is not counted.</p>"
        f"<ul class=advice>{items}</ul>{rest}"
    )


def _mark_up(text: str) -> str:
    """Return ``text`` as HTML, with names in backquotes as code and SBPs as coloured labels."""
    return re.sub(r"`([^`]*)`", r"<code>\1</code>", layout_html(text))


def _bars(lines: Sequence[Line]) -> str:
    sent: Counter[str] = Counter()
    for line in lines:
        sent[line.op] += line.nbytes
    rows = [(escape(op), n) for op, n in sent.most_common() if n]
    return f"<h2>Bytes by op</h2>{bars(rows)}" if rows else ""


def _program(lines: Sequence[Line]) -> str:
    heads = [
        ("#", True), ("op", False), ("count", True), ("layouts", False), ("boxings", False),
        ("bytes", True), ("where", False),
    ]  # fmt: skip
    return (
        "<h2>The program</h2><p class=note>Each op at each place, in the order in which they first "
        "ran, with the SBPs of its operands and results. A click on a head sorts.</p>"
        f"{search()}" + table("lines", heads, [_row(i, line) for i, line in enumerate(lines)])
    )


def _row(i: int, line: Line) -> list[str]:
    tag = " <span class=tag>whole</span>" if line.whole else ""
    tag += " <span class='tag plain'>compiled</span>" if line.compiled and line.count else ""
    is_single = len(line.layouts) == 1  # the count of the only layout is that of the line
    layouts = [layout_html(times(k, 1 if is_single else n)) for k, n in line.layouts.most_common(4)]
    boxings = [boxing_html(times(*item)) for item in line.boxings.most_common(4)]
    for texts, counts in ((layouts, line.layouts), (boxings, line.boxings)):
        if len(counts) > 4:
            texts.append(f"<span class=note>and {len(counts) - 4} more</span>")
    source = source_line(line.site)
    place = f"<span title='{escape(line.site)}'>{escape(short_site(line.site))}</span>"
    return [
        number(i, str(i + 1)),
        cell(f"<code>{escape(line.op)}</code>{tag}"),
        number(line.count, f"{line.count:,}" if line.count else ""),
        cell("<br>".join(layouts), "lays"),
        cell("<br>".join(boxings), "moves"),
        number(line.nbytes, bytes_text(line.nbytes) if line.nbytes else ""),
        cell(
            place + (f"<code title='{escape(source)}'>{escape(source)}</code>" if source else ""),
            "site",
        ),
    ]


def _times(timeline: Timeline | None) -> str:
    if timeline is None or not timeline.events:
        return ""
    zero = min(event.begin for event in timeline.events)
    present_kinds = {event.kind for event in timeline.events}
    # The lane of compiled steps is drawn only if there are any.
    kinds = [
        kind for kind in _LANES if kind in present_kinds or kind in ("op", "boxing", "backward")
    ]
    rows = [
        (
            kinds.index(event.kind),
            event.name,
            round((event.begin - zero) / 1e3, 2),
            -1 if event.end is None else round((event.end - event.begin) / 1e3, 2),
            short_site(event.site),
            " \u00b7 ".join(filter(None, (event.detail, _bytes_or_empty(event.nbytes)))),
        )
        for event in timeline.events[:MAX_DRAWN]
    ]
    left_out = len(timeline.events) + timeline.left_out - len(rows)
    rest = (
        f" The first {len(rows):,} events are drawn, and {left_out:,} later ones are not."
        if left_out
        else ""
    )
    note = (
        "Boxings that an op waits for lie below it. A thin line is a boxing that goes on beside "
        f"the program. On a GPU these are the times at which work was handed over.{rest}"
    )
    return canvas(f"Timeline of rank {timeline.rank}", note, [_LANES[k] for k in kinds], rows)


def _bytes_or_empty(count: int) -> str:
    return bytes_text(count) if count else ""
