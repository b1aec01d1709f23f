"""HTML page of the difference of two reports."""

from __future__ import annotations

from collections.abc import Sequence

from ..drawing.pages.html import boxing_html, cell, escape, frame, number, search, table
from ..spec.bytes_text import bytes_text

_Row = tuple[str, str, str, int, str]  # kind, op, where, bytes more, the differences in lines


def difference_page(summary: str, rows: Sequence[_Row]) -> str:
    """Return an HTML page with a row for each change.

    ``summary`` is the text under its title.
    """
    heads = [("what", False), ("op", False), ("bytes", True), ("changes", False), ("where", False)]
    html_rows = [
        [
            cell(f'<span class="tag {kind}">{kind}</span>'),
            cell(f"<code>{escape(op)}</code>"),
            number(
                nbytes, f"{'+' if nbytes > 0 else '-' if nbytes else ''}{bytes_text(abs(nbytes))}"
            ),
            cell("<br>".join(_mark_up(line) for line in text.splitlines()), "lays"),
            cell(escape(where), "site"),
        ]
        for kind, op, where, nbytes, text in rows
    ]
    body = (
        search() + table("lines", heads, html_rows)
        if html_rows
        else "<p>Nothing changed in layouts, boxings or bytes.</p>"
    )
    return frame("What changed", summary, body)


def _mark_up(line: str) -> str:
    """Return a line of a change's text as HTML, with one layout on each line.

    Of ``layouts: S(0) -> B  =>  B -> B``, what follows ``=>`` is below what precedes it.
    """
    word, _, change = line.partition(": ")
    old, arrow, new = change.partition("  =>  ")
    if not arrow:
        return _with_arrows(line)
    kinds = "<br>".join(map(_with_arrows, old.split("; ")))
    kinds += "".join(f"<br><b>&rArr;</b> {_with_arrows(kind)}" for kind in new.split("; "))
    return f"{escape(word)}: {kinds}"


def _with_arrows(text: str) -> str:
    return boxing_html(text).replace("-&gt;", "&rarr;")
