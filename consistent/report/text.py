"""Text form of a report: a summary, and a table with a line for each op and call site."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from mirrored.readable import on_one_line

from ..drawing.words import seconds_text
from ..spec.bytes_text import bytes_text
from .advice import Advice
from .lines import Line, most_common
from .timeline import Timeline

_HEAD = ("op", "count", "layout", "boxings", "bytes", "between hosts", "whole", "where")
_BETWEEN = _HEAD.index("between hosts")
_NO_OPS = "No op on a global tensor ran."
EMPTY = (
    "A report lists what ops on global tensors do inside its block, `with consistent.report():`; "
    "ops on plain tensors are not among them."
)
_NO_MEMORY = "to ranks with which it shares no memory"
_LIMITS = (32, 6, 44, 60, 14, 14, 5)


def summary(
    lines: Sequence[Line],
    timeline: Timeline | None = None,
    by_messages: int = 0,
    experts: str = "",
) -> str:
    """Return a few sentences on what ran and what it sent.

    Args:
        lines: the lines of the report.
        timeline: its times; None if none were taken.
        by_messages: the bytes that this rank sent to ranks with which it shares no memory.
        experts: the sentence of ``busiest``; "" for none.
    """
    ops = sum(line.count for line in lines if not line.compiled)
    steps = sum(line.count for line in lines if line.compiled)
    boxings = sum(sum(line.boxings.values()) for line in lines)
    if not ops and not boxings and not steps:
        return _NO_OPS
    places = len({line.site for line in lines if line.site and not line.compiled})
    counts = (
        [f"{_count_text(ops, 'op')} ran at {_count_text(places, 'place')}"]
        if ops or not steps
        else []
    )
    counts += [f"{_count_text(steps, 'compiled step')} ran"] if steps else []
    text = " and ".join(counts) + _sent_clause(lines, boxings)
    if between := sum(line.between for line in lines):
        text += f". All ranks together sent {bytes_text(between)} from host to host"
    if by_messages:
        text += f". This rank sent {bytes_text(by_messages)} {_NO_MEMORY}"
    text += f". {experts}" if experts else ""
    whole = sorted({line.op for line in lines if line.whole})
    text += (
        f". Every rank computed all of {on_one_line(', '.join(whole))}."
        if whole
        else ". No op ran whole on every rank."
    )
    return text if timeline is None or not timeline.events else text + _time_sentence(timeline)


def _time_sentence(timeline: Timeline) -> str:
    """Return the sentence of the summary about the time that this rank computed and waited."""
    seconds = timeline.seconds()
    return (
        f" Rank {timeline.rank} computed for {seconds_text(seconds['computing'])} and waited for "
        f"boxings for {seconds_text(seconds['boxing'])}."
    )


def _sent_clause(lines: Sequence[Line], boxings: int) -> str:
    """Return the part of the summary about what the busiest rank sent."""
    nbytes = sum(line.nbytes for line in lines)
    if not nbytes:
        return ", and nothing was sent"
    most = max(lines, key=lambda line: line.nbytes)
    place = on_one_line(f"`{most.op}` at {most.where}") if most.site else "backward"
    clause = f"; {_count_text(boxings, 'boxing')} sent {bytes_text(nbytes)} from the busiest rank"
    return f"{clause}, {most.nbytes / nbytes:.0%} of it for {place}"


def table(
    lines: Sequence[Line],
    advice: Sequence[Advice] = (),
    by_messages: int = 0,
    experts: str = "",
) -> str:
    """Return the lines as a table, largest senders first, followed by the advice and the totals.

    ``by_messages`` and ``experts`` are those of ``summary``.
    """
    if not lines:
        return f"{_NO_OPS}\n{EMPTY}"
    rows = [_HEAD, *map(_cells, sorted(lines, key=lambda line: -line.nbytes))]
    between = sum(line.between for line in lines)
    rows = [(*(_fit(c, n) for c, n in zip(row, _LIMITS)), _fit_end(row[-1], 40)) for row in rows]
    if not between:  # usually a single host: leave the column out
        rows = [(*row[:_BETWEEN], *row[_BETWEEN + 1 :]) for row in rows]
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    text = [
        "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
    text.insert(1, "  ".join("-" * w for w in widths))
    text += [f"advice: {on_one_line(str(each))}" for each in advice]
    text += [experts] if experts else []
    whole = on_one_line(", ".join(sorted({line.op for line in lines if line.whole}))) or "none"
    total = sum(line.nbytes for line in lines)
    sent = f", {between:,} of all ranks from host to host" if between else ""
    sent += f", {by_messages:,} by this rank {_NO_MEMORY}" if by_messages else ""
    text.append(f"{total:,} bytes boxed{sent}; ran whole on every rank: {whole}")
    return "\n".join(text)


def busiest(rows: Mapping[int, int]) -> str:
    """Return a sentence on the rank that got most tokens for its experts; "" if there are none.

    ``rows`` maps a rank to the number of token rows that it got.
    """
    if not any(rows.values()):
        return ""
    rank = max(rows, key=lambda each: rows[each])
    share = rows[rank] / sum(rows.values())
    return (
        f"Rank {rank} got most rows for its experts, {rows[rank]:,}, which is {share:.0%} of all "
        f"({1 / len(rows):.0%} if all ranks had as many)"
    )


def _cells(line: Line) -> tuple[str, ...]:
    return (
        line.op,
        str(line.count or ""),
        most_common(line.layouts),
        most_common(line.boxings),
        f"{line.nbytes:,}" if line.nbytes else "",
        f"{line.between:,}" if line.between else "",
        "yes" if line.whole else "",
        line.site,
    )


def _count_text(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' if count != 1 else ''}"


def _fit(text: str, width: int) -> str:
    text = on_one_line(text)
    return text if len(text) <= width else text[: width - 3] + "..."


def _fit_end(text: str, width: int) -> str:
    """Return ``text``, or its last characters if it is longer than ``width``.

    The end of a file's path says more than its start.
    """
    text = on_one_line(text)
    return text if len(text) <= width else "..." + text[3 - width :]
