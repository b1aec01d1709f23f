"""Every row of docs/coming_from.md has a program that runs."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Iterator

from tests.docs.coming_from import RANKS, ROWS
from tests.generated import DOCS
from tests.ranks import pool


def _rows() -> Iterator[tuple[str, str]]:
    """(table, left cell) of each row."""
    for section in (DOCS / "coming_from.md").read_text().split("\n## ")[1:]:
        for text in re.findall(r"^\| (.+?) \|", section, re.MULTILINE)[2:]:
            yield section.partition("\n")[0], text


def test_every_row_has_a_program_and_every_program_a_row() -> None:
    rows = list(_rows())
    assert len(rows) > 60
    for table, cell in rows:
        found = [start for name, start in ROWS if name == table and cell.startswith(start)]
        assert len(found) == 1, (table, cell, found)
    for table, start in ROWS:
        assert any(name == table and cell.startswith(start) for name, cell in rows), (table, start)


def _failures(rank: int) -> dict[str, str]:
    warnings.simplefilter("ignore")
    failed = {}
    for program in dict.fromkeys(ROWS.values()):
        try:
            program()
        except Exception:  # noqa: BLE001  (all of them are told at once)
            failed[program.__name__] = traceback.format_exc()[-900:]
    return failed


def test_the_programs_of_the_rows_run() -> None:
    found = pool(RANKS).run(_failures, timeout=300)
    assert found == [{}] * RANKS, "\n".join(f"{k}: {v}" for k, v in found[0].items())
