"""The result of ``verify`` as an HTML page, with a table of wrong tensors for each plan."""

from __future__ import annotations

from collections.abc import Sequence

from ..drawing.pages.html import cell, escape, frame, search, table
from .compare import Compared

# Most rows of a table. An early fault makes everything after it differ, and the first rows show it.
MAX_ROWS = 200


def page(results: Sequence[Compared]) -> str:
    """Return the result of ``verify`` as an HTML page, with a table for each plan and program."""
    bad = [each for each in results if not each.ok]
    lead = (
        f"{len(bad)} of {len(results)} do not have the numbers of one process."
        if bad
        else f"All {len(results)} have the numbers of one process."
    )
    return frame("Numbers of one process", lead, search() + "".join(map(_section, results)))


def _section(result: Compared) -> str:
    """Return the part of the page about one plan or program."""
    title = f"<h2>{escape(result.name)}</h2>"
    if result.error:
        title += f"<p>It raised.</p><pre>{escape(result.error)}</pre>"
    rest = f" {escape(result.rest)}." if result.choice else ""
    if not result.wrong:
        return f"{title}<p>{result.compared} tensors are those of one process.{rest}</p>"
    heads = [("tensor", False), ("what is wrong", False), ("off by", True), ("rounding", True)]
    heads += [("layout", False), ("where", False)]
    rows = [
        [
            cell(escape(wrong.tensor)),
            cell(escape(wrong.kind)),
            cell(f"{wrong.error:.3g}"),
            cell(f"{wrong.allowed:.3g}"),
            cell(f"<code>{escape(wrong.layout)}</code>", "lays"),
            cell(escape(wrong.where), "site"),
        ]
        for wrong in result.wrong[:MAX_ROWS]
    ]
    counts = f"{len(result.wrong)} of {result.compared} tensors differ, in the order of the program"
    more = f"; the first {MAX_ROWS} are shown" if len(result.wrong) > MAX_ROWS else ""
    return f"{title}<p>{counts}{more}.{rest}</p>" + table("tensors", heads, rows)
