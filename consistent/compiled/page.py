"""HTML page of a program, self-contained: the lines of the step with what each computes and sends,
bytes by boxing, messages that optimizations removed, and every op."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from ..drawing.pages.html import (
    bar,
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
from ..drawing.source import functions
from ..drawing.words import short_site, times
from ..spec.bytes_text import bytes_text
from .listing import ListingRow, rows
from .program import Program

_SENDING_KINDS = ("message", "start")


@dataclass
class _LineTotals:
    """Totals of the rows of a program that belong to one source line of the step.

    ``layouts`` counts result layouts, and ``boxings`` the changes of layout that the line sends.
    """

    ops: int = 0
    sent: int = 0
    layouts: Counter[str] = field(default_factory=Counter)
    boxings: Counter[str] = field(default_factory=Counter)


def page(program: Program, others: int = 0) -> str:
    """Return the HTML page of ``program``.

    ``others`` is the number of other programs of the step, which the page mentions.
    """
    listing_rows = list(rows(program))
    parts = [
        _totals(program, listing_rows), _other_programs(others),
        _source_lines(program, listing_rows), _boxings(listing_rows), _removed_messages(program),
        _notes(program), _values_table("What it reads", "read", listing_rows),
        _ops_table(listing_rows), _values_table("What it puts into places", "put", listing_rows),
    ]  # fmt: skip
    return frame(
        f"Program of {program.name}", _lead_sentence(program, listing_rows), "\n".join(parts)
    )


def not_recorded_page(name: str, why: str) -> str:
    """Return the HTML page of a step that could not be recorded, with the reason ``why``."""
    return frame(
        f"Step {name}", "It runs as it is written, not as a program.", f"<pre>{escape(why)}</pre>"
    )


def _lead_sentence(program: Program, listing_rows: Sequence[ListingRow]) -> str:
    sent, count = program.bytes, len(program.messages())
    break_names = [row.name for row in listing_rows if row.kind == "graph break"]
    text = "It sends nothing" if not count else f"{count} message{'s' if count > 1 else ''}"
    if count:
        text += f" send{'s' if count == 1 else ''} {bytes_text(sent)} from this rank"
        bytes_by_line: Counter[str] = Counter()
        for row in listing_rows:
            bytes_by_line[short_site(row.where)] += row.sent or 0
        where, most = bytes_by_line.most_common(1)[0]
        if sent:
            text += f", {most / sent:.0%} of it at {where}"
    if break_names:
        text += f". {', '.join(dict.fromkeys(break_names))} runs as it is written"
    return f"{text}."


def _totals(program: Program, listing_rows: Sequence[ListingRow]) -> str:
    saved_bytes = sum(message.bytes for message in program.saved)
    return numbers(
        (
            (f"{sum(row.kind in ('op', 'random') for row in listing_rows):,}", "ops"),
            (f"{len(program.messages()):,}", "messages"),
            (bytes_text(program.bytes), "sent by this rank"),
            *(((bytes_text(saved_bytes), "left out by passes"),) if program.saved else ()),
            (
                bytes_text(sum(row.held for row in listing_rows if row.kind == "read")),
                "read on this rank",
            ),
        )
    )


def _other_programs(count: int) -> str:
    if not count:
        return ""
    count_text = f"{count} other program{'s' if count > 1 else ''}"
    return (
        f"<p class=note>The step has {count_text}, for other inputs or states. This is the one "
        "that was used last; <code>print(step.show())</code> has them all.</p>"
    )


# -- the lines of the step -------------------------------------------------------------------------


def _source_lines(program: Program, listing_rows: Sequence[ListingRow]) -> str:
    totals: dict[tuple[str, int], _LineTotals] = defaultdict(_LineTotals)
    places: list[tuple[str, int, str]] = []
    rows_with_line = [row for row in listing_rows if row.where]
    for where, group in groupby(rows_with_line, lambda row: row.where):
        place, _, name = where.rpartition(" in ")
        file, _, line = place.rpartition(":")
        places.append((file, int(line), name))
        _add_rows(totals[file, int(line)], list(group))
    if not totals:
        return ""
    longest = max(at.sent for at in totals.values())
    # The step's own function is shown first.
    step_name = program.name.replace(".<locals>", "")
    ordered = sorted(
        functions(places), key=lambda function: function.name not in (step_name, program.name)
    )
    blocks = []
    for function in ordered:
        lines = [
            _gap_row()
            if numbered is None
            else _source_line(*numbered, totals.get((function.file, numbered[0])), longest)
            for numbered in function.source()
        ]
        blocks.append(
            f"<tr class=head title='{escape(function.file)}'><td colspan=5>"
            f"<code>{escape(function.name)}</code> "
            f"<span>{escape(short_site(f'{function.file}:{function.first}'))}</span>"
            "</td></tr>"
            f"{''.join(lines)}"
        )
    return (
        "<h2>The step</h2><p class=note>Each line with what it ends in, how that lies, which "
        "boxings run there and what this rank sends in them. What backward does stands at the line "
        "that calls it. Marked lines box.</p>"
        f"<div class=scroll><table class=listing>{''.join(blocks)}</table></div>"
    )


def _add_rows(totals: _LineTotals, group: Sequence[ListingRow]) -> None:
    totals.ops += sum(row.kind in ("op", "random") for row in group)
    totals.sent += sum(row.sent or 0 for row in group)
    totals.boxings.update(row.boxing_text for row in group if row.kind in _SENDING_KINDS)
    layouts = [row.layout for row in reversed(group) if row.layout and row.kind != "message"]
    if layouts:  # the last layout with an SBP (text after the sizes), or else the last layout
        totals.layouts[
            next((layout for layout in layouts if not layout.endswith("]")), layouts[0])
        ] += 1


def _gap_row() -> str:
    return "<tr class=none><td class=no>&#8942;</td><td colspan=4></td></tr>"


def _source_line(number: int, text: str, totals: _LineTotals | None, longest: int) -> str:
    code = f"<td class=no>{number}</td><td class=src><code>{escape(text)}</code></td>"
    if totals is None:
        return f"<tr class=none>{code}<td colspan=3></td></tr>"
    return (
        f"<tr class={'boxes' if totals.boxings else 'ops'} title='{totals.ops} ops'>{code}"
        f"<td class=lays>{'<br>'.join(_most_common(totals.layouts, layout_html))}</td>"
        f"<td class=lays>{'<br>'.join(_most_common(totals.boxings, boxing_html))}</td>"
        f"<td class=sent>{bar(totals.sent, longest, 'sent')}</td></tr>"
    )


def _most_common(counts: Counter[str], mark: Callable[[str], str], most: int = 3) -> list[str]:
    is_single = len(counts) == 1 and counts.total() == 1
    texts = [mark(times(name, 1 if is_single else n)) for name, n in counts.most_common(most)]
    if len(counts) > most:
        texts.append(f"<span class=note>and {len(counts) - most} more</span>")
    return texts


# -- sums and tables -------------------------------------------------------------------------------


def _boxings(listing_rows: Sequence[ListingRow]) -> str:
    sent: Counter[str] = Counter()
    for row in listing_rows:
        if row.sent:
            sent[row.boxing_text] += row.sent
    if not sent:
        return ""
    shares = [(boxing_html(boxing), n) for boxing, n in sent.most_common()]
    return f"<h2>Bytes by boxing</h2>{bars(shares)}"


def _removed_messages(program: Program) -> str:
    if not program.saved:
        return ""
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for message in program.saved:
        key = message.text.split(" ")[0], message.why, message.where
        counts[key] += 1
        sent[key] += message.bytes
    heads = [("message", False), ("count", True), ("bytes", True), ("why", False), ("where", False)]
    cells = [
        [
            cell(f"<code>{escape(name)}</code>"),
            number(counts[name, why, where], f"{counts[name, why, where]:,}"),
            number(nbytes, bytes_text(nbytes)),
            cell(escape(why)),
            cell(f"<span title='{escape(where)}'>{escape(short_site(where))}</span>"),
        ]
        for (name, why, where), nbytes in sent.most_common()
    ]
    return f"<h2>Not sent</h2>{table('saved', heads, cells)}"


def _notes(program: Program) -> str:
    items = "".join(f"<li>{escape(note)}</li>" for note in program.notes)
    return f"<h2>What was decided</h2><ul>{items}</ul>" if items else ""


def _values_table(title: str, kind: str, listing_rows: Sequence[ListingRow]) -> str:
    shown_rows = [row for row in listing_rows if row.kind == kind]
    if not shown_rows:
        return ""
    longest = max(row.held for row in shown_rows)
    heads = [("value", False), *([("layout", False), ("bytes", True)] if longest else [])]
    cells = [
        [
            cell(f"<code>{escape(row.text)}</code>"),
            *([cell(layout_html(row.layout)), _bytes_cell(row.held, longest)] if longest else []),
        ]
        for row in shown_rows
    ]
    size = f", {bytes_text(sum(row.held for row in shown_rows))} on this rank" if longest else ""
    count = f"{len(shown_rows):,} value{'s' if len(shown_rows) > 1 else ''}"
    return (
        f"<details><summary>{title}: {count}{size}</summary>{table(kind, heads, cells)}</details>"
    )


def _bytes_cell(value: int, longest: int, kind: str = "") -> str:
    return f'<td class=n data-n="{value}">{bar(value, longest, kind)}</td>'


def _ops_table(listing_rows: Sequence[ListingRow]) -> str:
    shown_rows = [row for row in listing_rows if row.kind not in ("read", "put")]
    most_held = max((row.held for row in shown_rows), default=0)
    most_sent = max((row.sent or 0 for row in shown_rows), default=0)
    heads = [
        ("#", True), ("op", False), ("layout", False), ("result", True), ("sent", True),
        ("where", False),
    ]  # fmt: skip
    boxes = {i for i, row in enumerate(shown_rows) if row.kind in _SENDING_KINDS}
    body = table(
        "lines",
        heads,
        [_op_cells(i, row, most_held, most_sent) for i, row in enumerate(shown_rows)],
        boxes,
    )
    return (
        "<h2>The program</h2><p class=note>Every op and message in order, with the bytes that this "
        "rank holds of its result and those that it sends. Marked lines send. A click on a head "
        f"sorts.</p>{search()}{body}"
    )


def _op_cells(i: int, row: ListingRow, most_held: int, most_sent: int) -> list[str]:
    code = f"<code title='{escape(row.text)}'>{escape(row.text)}</code>"
    return [
        number(i, str(i + 1)),
        cell(code, "long"),
        cell(layout_html(row.layout), "lays"),
        _bytes_cell(row.held, most_held),
        _bytes_cell(row.sent or 0, most_sent, "sent"),
        cell(f"<span title='{escape(row.where)}'>{escape(row.location)}</span>"),
    ]
