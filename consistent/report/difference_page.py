"""HTML page of the difference of two reports."""

from __future__ import annotations

from collections.abc import Sequence

from ..drawing.pages.html import cell, escaped, frame, moved, number, search, table
from ..spec.bytes_text import bytes_text

_Row = tuple[str, str, str, int, str]  # kind, op, where, bytes more, the differences in lines


def difference_page(summary: str, rows: Sequence[_Row]) -> str:
    """Return an HTML page with a row for each change.

    ``summary`` is the text under its title.
    """
    heads = [("what", False), ("op", False), ("bytes", True), ("changes", False), ("where", False)]
    made = [
        [
            cell(f'<span class="tag {kind}">{kind}</span>'),
            cell(f"<code>{escaped(op)}</code>"),
            number(
                nbytes, f"{'+' if nbytes > 0 else '-' if nbytes else ''}{bytes_text(abs(nbytes))}"
            ),
            cell("<br>".join(_marked(line) for line in told.splitlines()), "lays"),
            cell(escaped(where), "site"),
        ]
        for kind, op, where, nbytes, told in rows
    ]
    body = (
        search() + table("lines", heads, made)
        if made
        else "<p>Nothing changed in layouts, boxings or bytes.</p>"
    )
    return frame("What changed", summary, body)


def _marked(line: str) -> str:
    """Return a line of a change's text as HTML, with one layout on each line.

    Of ``layouts: S(0) -> B  =>  B -> B``, what follows ``=>`` is below what precedes it.
    """
    word, _, told = line.partition(": ")
    was, arrow, now = told.partition("  =>  ")
    if not arrow:
        return _arrows(line)
    kinds = "<br>".join(map(_arrows, was.split("; ")))
    kinds += "".join(f"<br><b>&rArr;</b> {_arrows(kind)}" for kind in now.split("; "))
    return f"{escaped(word)}: {kinds}"


def _arrows(text: str) -> str:
    return moved(text).replace("-&gt;", "&rarr;")
