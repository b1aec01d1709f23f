"""Text form of a program, which reads like the step: one op per line, with layout, bytes, and line
of the step.

```
program of step: 3 messages, 1.5 KiB sent by this rank
  %4 = mm(%2, %3)                             f32[4, 8] S(0)                    train.py:12
  %5 = message all_gather(%4)                 f32[8, 8] B      512 B            train.py:13
  put %9 into model.0.weight.grad
  call SGD.step as it is written
```
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mirrored.readable import on_one_line

from ..drawing.files import check_page_path, write
from ..drawing.words import short_site
from ..spec.bytes_text import bytes_text
from .listing import ListingRow, rows
from .program import Program


def program_text(program: Program) -> str:
    """Return the program as text, with a line for each op."""
    sent = bytes_text(program.bytes)
    cell_rows = [_cells(row) for row in rows(program)]
    widths = [
        min(max(len(row[i]) for row in cell_rows), most) for i, most in ((0, 70), (1, 60), (2, 9))
    ]
    count = len(program.messages())
    lines = [f"program of {program.name}: {count} messages, {sent} sent by this rank"]
    for row in cell_rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths)]
        lines.append("  " + "  ".join([*cells, row[3]]).rstrip())
    for saved in program.saved:
        name, at = saved.text.split(" ")[0], short_site(saved.where)
        lines.append(f"  not sent: {name}, {bytes_text(saved.bytes)}, {at} ({saved.why})")
    lines += [f"  {note}" for note in program.notes]
    return "\n".join(map(on_one_line, lines))


def _cells(row: ListingRow) -> tuple[str, str, str, str]:
    sent = "" if row.sent is None else bytes_text(row.sent)
    return row.text, row.layout, sent, row.location


def save_page(path: str | Path, name: str, programs: Sequence[Any]) -> Path:
    """Write the last of ``programs`` as an HTML page to ``path``, creating missing folders.

    ``name`` is the name of the step.

    Raises:
        ValueError: the name does not end in .html.
        RuntimeError: there is no program yet.
    """
    check_page_path(path)
    if not programs:
        raise RuntimeError(
            f"show: {name} was not recorded yet, so there is nothing to write to {str(path)!r}.\n"
            "  Call the step twice: the second call is recorded."
        )
    from .page import not_recorded_page, page  # imported only if a page is requested

    last, others = programs[-1], len(programs) - 1
    return write(
        path, page(last.program, others) if last.program else not_recorded_page(name, last.why)
    )
