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
    cell,
    escaped,
    frame,
    labelled,
    moved,
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

_SENT = ("message", "start")


@dataclass
class _At:
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
    made = list(rows(program))
    parts = [
        _numbers(program, made), _others(others), _lines(program, made), _boxings(made),
        _left_out(program), _notes(program), _kept("What it reads", "read", made), _ops(made),
        _kept("What it puts into places", "put", made),
    ]  # fmt: skip
    return frame(f"Program of {program.name}", _lead(program, made), "\n".join(parts))


def refused(name: str, why: str) -> str:
    """Return the HTML page of a step that could not be recorded, with the reason ``why``."""
    return frame(
        f"Step {name}", "It runs as it is written, not as a program.", f"<pre>{escaped(why)}</pre>"
    )


def _lead(program: Program, made: Sequence[ListingRow]) -> str:
    sent, count = program.bytes, len(program.messages())
    broken = [row.name for row in made if row.kind == "graph break"]
    text = "It sends nothing" if not count else f"{count} message{'s' if count > 1 else ''}"
    if count:
        text += f" send{'s' if count == 1 else ''} {bytes_text(sent)} from this rank"
        of_lines: Counter[str] = Counter()
        for row in made:
            of_lines[short_site(row.where)] += row.sent or 0
        where, most = of_lines.most_common(1)[0]
        if sent:
            text += f", {most / sent:.0%} of it at {where}"
    if broken:
        text += f". {', '.join(dict.fromkeys(broken))} runs as it is written"
    return f"{text}."


def _numbers(program: Program, made: Sequence[ListingRow]) -> str:
    saved = sum(each.bytes for each in program.saved)
    return numbers(
        (
            (f"{sum(row.kind in ('op', 'random') for row in made):,}", "ops"),
            (f"{len(program.messages()):,}", "messages"),
            (bytes_text(program.bytes), "sent by this rank"),
            *(((bytes_text(saved), "left out by passes"),) if program.saved else ()),
            (bytes_text(sum(row.held for row in made if row.kind == "read")), "read on this rank"),
        )
    )


def _others(count: int) -> str:
    if not count:
        return ""
    said = f"{count} other program{'s' if count > 1 else ''}"
    return (
        f"<p class=note>The step has {said}, for other inputs or states. This is the one that was "
        "used last; <code>print(step.show())</code> has them all.</p>"
    )


# -- the lines of the step -------------------------------------------------------------------------


def _lines(program: Program, made: Sequence[ListingRow]) -> str:
    found: dict[tuple[str, int], _At] = defaultdict(_At)
    places: list[tuple[str, int, str]] = []
    placed = [row for row in made if row.where]
    for where, group in groupby(placed, lambda row: row.where):
        place, _, name = where.rpartition(" in ")
        file, _, line = place.rpartition(":")
        places.append((file, int(line), name))
        _add(found[file, int(line)], list(group))
    if not found:
        return ""
    longest = max(at.sent for at in found.values())
    # The step's own function is shown first.
    own = program.name.replace(".<locals>", "")
    ordered = sorted(functions(places), key=lambda each: each.name not in (own, program.name))
    blocks = []
    for each in ordered:
        lines = [
            _gap() if one is None else _line(*one, found.get((each.file, one[0])), longest)
            for one in each.source()
        ]
        blocks.append(
            f"<tr class=head title='{escaped(each.file)}'><td colspan=5>"
            f"<code>{escaped(each.name)}</code> "
            f"<span>{escaped(short_site(f'{each.file}:{each.first}'))}</span></td></tr>"
            f"{''.join(lines)}"
        )
    return (
        "<h2>The step</h2><p class=note>Each line with what it ends in, how that lies, which "
        "boxings run there and what this rank sends in them. What backward does stands at the line "
        "that calls it. Marked lines box.</p>"
        f"<div class=scroll><table class=listing>{''.join(blocks)}</table></div>"
    )


def _add(at: _At, group: Sequence[ListingRow]) -> None:
    at.ops += sum(row.kind in ("op", "random") for row in group)
    at.sent += sum(row.sent or 0 for row in group)
    at.boxings.update(row.move for row in group if row.kind in _SENT)
    ends = [row.layout for row in reversed(group) if row.layout and row.kind != "message"]
    if ends:  # the last layout with an SBP (text after the sizes), or else the last layout
        at.layouts[next((each for each in ends if not each.endswith("]")), ends[0])] += 1


def _gap() -> str:
    return "<tr class=none><td class=no>&#8942;</td><td colspan=4></td></tr>"


def _line(number: int, text: str, at: _At | None, longest: int) -> str:
    code = f"<td class=no>{number}</td><td class=src><code>{escaped(text)}</code></td>"
    if at is None:
        return f"<tr class=none>{code}<td colspan=3></td></tr>"
    return (
        f"<tr class={'boxes' if at.boxings else 'ops'} title='{at.ops} ops'>{code}"
        f"<td class=lays>{'<br>'.join(_most(at.layouts, labelled))}</td>"
        f"<td class=lays>{'<br>'.join(_most(at.boxings, moved))}</td>"
        f"<td class=sent>{bar(at.sent, longest, 'sent')}</td></tr>"
    )


def _most(counts: Counter[str], mark: Callable[[str], str], most: int = 3) -> list[str]:
    alone = len(counts) == 1 and counts.total() == 1
    shown = [mark(times(name, 1 if alone else n)) for name, n in counts.most_common(most)]
    if len(counts) > most:
        shown.append(f"<span class=note>and {len(counts) - most} more</span>")
    return shown


# -- sums and tables -------------------------------------------------------------------------------


def _boxings(made: Sequence[ListingRow]) -> str:
    sent: Counter[str] = Counter()
    for row in made:
        if row.sent:
            sent[row.move] += row.sent
    if not sent:
        return ""
    return f"<h2>Bytes by boxing</h2>{bars([(moved(name), n) for name, n in sent.most_common()])}"


def _left_out(program: Program) -> str:
    if not program.saved:
        return ""
    counts: Counter[tuple[str, str, str]] = Counter()
    sent: Counter[tuple[str, str, str]] = Counter()
    for each in program.saved:
        key = each.text.split(" ")[0], each.why, each.where
        counts[key] += 1
        sent[key] += each.bytes
    heads = [("message", False), ("count", True), ("bytes", True), ("why", False), ("where", False)]
    made = [
        [
            cell(f"<code>{escaped(name)}</code>"),
            number(counts[name, why, where], f"{counts[name, why, where]:,}"),
            number(nbytes, bytes_text(nbytes)),
            cell(escaped(why)),
            cell(f"<span title='{escaped(where)}'>{escaped(short_site(where))}</span>"),
        ]
        for (name, why, where), nbytes in sent.most_common()
    ]
    return f"<h2>Not sent</h2>{table('saved', heads, made)}"


def _notes(program: Program) -> str:
    items = "".join(f"<li>{escaped(note)}</li>" for note in program.notes)
    return f"<h2>What was decided</h2><ul>{items}</ul>" if items else ""


def _kept(title: str, kind: str, made: Sequence[ListingRow]) -> str:
    found = [row for row in made if row.kind == kind]
    if not found:
        return ""
    longest = max(row.held for row in found)
    heads = [("value", False), *([("layout", False), ("bytes", True)] if longest else [])]
    cells = [
        [
            cell(f"<code>{escaped(row.text)}</code>"),
            *([cell(labelled(row.layout)), _sized(row.held, longest)] if longest else []),
        ]
        for row in found
    ]
    size = f", {bytes_text(sum(row.held for row in found))} on this rank" if longest else ""
    count = f"{len(found):,} value{'s' if len(found) > 1 else ''}"
    return (
        f"<details><summary>{title}: {count}{size}</summary>{table(kind, heads, cells)}</details>"
    )


def _sized(value: int, longest: int, kind: str = "") -> str:
    return f'<td class=n data-n="{value}">{bar(value, longest, kind)}</td>'


def _ops(made: Sequence[ListingRow]) -> str:
    shown = [row for row in made if row.kind not in ("read", "put")]
    held = max((row.held for row in shown), default=0)
    sent = max((row.sent or 0 for row in shown), default=0)
    heads = [
        ("#", True), ("op", False), ("layout", False), ("result", True), ("sent", True),
        ("where", False),
    ]  # fmt: skip
    boxes = {i for i, row in enumerate(shown) if row.kind in _SENT}
    body = table("lines", heads, [_op(i, row, held, sent) for i, row in enumerate(shown)], boxes)
    return (
        "<h2>The program</h2><p class=note>Every op and message in order, with the bytes that this "
        "rank holds of its result and those that it sends. Marked lines send. A click on a head "
        f"sorts.</p>{search()}{body}"
    )


def _op(i: int, row: ListingRow, held: int, sent: int) -> list[str]:
    code = f"<code title='{escaped(row.text)}'>{escaped(row.text)}</code>"
    return [
        number(i, str(i + 1)),
        cell(code, "long"),
        cell(labelled(row.layout), "lays"),
        _sized(row.held, held),
        _sized(row.sent or 0, sent, "sent"),
        cell(f"<span title='{escaped(row.where)}'>{escaped(row.at)}</span>"),
    ]
