"""HTML building blocks of pages: the frame, sortable tables, bars, and layouts as coloured
labels."""

from __future__ import annotations

import html
import re
from collections.abc import Callable, Collection, Mapping, Sequence

from mirrored.readable import escape_invisible

from ...spec.bytes_text import bytes_text
from .script import SCRIPT
from .style import STYLE

_SBP = re.compile(r"S\(\d+\)|P\((?:max|min)\)|(?<!\d )\b[BP]\b(?![(\w])")  # not the unit of "4 B"
_MOVE = re.compile(r"-(\w+(?:\([^)]*\))?)-&gt;")


def escape(text: object) -> str:
    """Return ``text`` with all characters that have a meaning in HTML escaped."""
    return html.escape(escape_invisible(str(text)))


def frame(title: str, lead: str, body: str) -> str:
    """Return a complete HTML page that loads no other resources.

    ``lead`` is the text under the title, and ``body`` is HTML.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>consistent: {escape(title)}</title><style>{STYLE}</style></head>\n<body><main>"
        f"<header><div><h1>{escape(title)}</h1><p class=lead>{escape(lead)}</p></div>"
        '<button id="theme" type="button">Light / dark</button></header>\n'
        f"{body}\n</main><script>{SCRIPT}</script></body></html>\n"
    )


def numbers(shown: Sequence[tuple[object, str]]) -> str:
    """Return a row of large numbers as HTML, one for each (number, label)."""
    items = "".join(f"<div><b>{escape(n)}</b><span>{word}</span></div>" for n, word in shown)
    return f"<div class=numbers>{items}</div>"


def bars(rows: Sequence[tuple[str, int]], most: int = 12) -> str:
    """Return one bar as HTML for each row, with its bytes and its share of the total.

    Args:
        rows: (name as HTML, bytes); at least one.
        most: number of rows to show; those after them become one bar.
    """
    rest = sum(n for _, n in rows[most:])
    shown = [*rows[:most], *([(f"{len(rows) - most} others", rest)] if rest else [])]
    longest, total = max(n for _, n in shown), sum(n for _, n in shown)
    items = "".join(
        f"<code>{name}</code><i style='width:{100 * n / longest:.2f}%' title='{n:,} bytes'></i>"
        f"<span class=n>{bytes_text(n)}</span><span class=n>{n / total:.0%}</span>"
        for name, n in shown
    )
    return f"<div class=bars>{items}</div>"


def stacks(
    kinds: Mapping[str, str],
    rows: Sequence[tuple[str, Mapping[str, float], str]],
    longest: float,
    shown: Callable[[float], str],
) -> str:
    """Return one stacked bar per row as HTML, under a legend of the colours.

    Args:
        kinds: colour of each kind of value, by names in style.py.
        rows: (name, value of each kind, text at the end of the bar) of each bar.
        longest: the value of a bar of full length.
        shown: formats a value for the tooltip.
    """
    used_kinds = [kind for kind in kinds if any(values.get(kind) for _, values, _ in rows)]
    legend = "".join(
        f"<span class=key style='background:var({kinds[kind]})'></span>{escape(kind)}"
        for kind in used_kinds
    )
    items = "".join(
        f"<code>{escape(name)}</code><div>"
        + "".join(
            f"<i style='width:{100 * values[kind] / max(longest, 1e-30):.3f}%;"
            f"background:var({kinds[kind]})' title='{escape(f'{kind}: {shown(values[kind])}')}'>"
            "</i>"
            for kind in used_kinds
            if values.get(kind)
        )
        + f"</div><span class=n>{escape(text)}</span>"
        for name, values, text in rows
    )
    return f"<p class=legend>{legend}</p><div class=stacks>{items}</div>"


def bar(value: int, longest: int, kind: str = "") -> str:
    """Return a small bar with ``value`` bytes as its text, for a table cell or a line.

    ``longest`` is the value of a bar of full length, and ``kind`` the bar's CSS class in style.py.
    """
    if not value:
        return ""
    share = 100 * value / max(longest, 1)
    return (
        f"<span class='small {kind}' title='{value:,} bytes'><span>{bytes_text(value)}</span>"
        f"<i style='width:{share:.2f}%'></i></span>"
    )


def search() -> str:
    """Return a search field as HTML, which hides rows of the page's table ``lines``.

    The rows without the typed words are hidden.
    """
    return (
        "<div class=tools><input id=search type=search placeholder='Search: op, file, S(0) ...' "
        "aria-label=Search><span id=found class=note></span></div>"
    )


def layout_html(text: str) -> str:
    """Return a text such as ``S(0), B -> S(0)`` as HTML, with each SBP as a coloured label."""
    # Escape first: the labels that are added are HTML.
    marked = re.sub(_SBP, lambda m: _sbp_label(m[0]), escape(text))
    return marked.replace("-&gt;", "&rarr;")


def boxing_html(text: str) -> str:
    """Return a change of layout such as ``S(0) -all_gather(0)-> B`` as HTML.

    The operation is grey, and each SBP a coloured label.
    """
    marked = re.sub(_MOVE, r"<span class=move>\1 &rarr;</span>", escape(text))
    return re.sub(_SBP, lambda m: _sbp_label(m[0]), marked)


def _sbp_label(sbp: str) -> str:
    kind = {"S": "sbp s", "P": "sbp p", "B": "sbp"}[sbp[0]]
    return f'<span class="{kind}">{sbp}</span>'


def table(
    name: str,
    heads: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[str]],
    boxes: Collection[int] = (),
) -> str:
    """Return an HTML table whose rows are sorted by a column when its head is clicked.

    Args:
        name: id of the table.
        heads: (name, whether the column holds numbers) of each column.
        rows: the cells of each row, as HTML (see ``cell`` and ``number``).
        boxes: indices of the rows to mark, such as those that send.
    """
    top = "".join(
        f'<th{" class=n" if number else ""}><button type="button">{escape(text)}</button></th>'
        for text, number in heads
    )
    body = "\n".join(
        f"<tr{' class=boxes' if i in boxes else ''}>{''.join(row)}</tr>"
        for i, row in enumerate(rows)
    )
    return (
        f'<div class=scroll><table id="{name}"><thead><tr>{top}</tr></thead>'
        f"<tbody>\n{body}\n</tbody></table></div>"
    )


def cell(text: str, kind: str = "") -> str:
    """Return a table cell with the HTML ``text``; ``kind`` is its CSS class."""
    return f'<td class="{kind}">{text}</td>' if kind else f"<td>{text}</td>"


def number(value: int, text: str) -> str:
    """Return a table cell that shows ``text`` and is sorted by ``value``."""
    return f'<td class=n data-n="{value}">{escape(text)}</td>'
