"""The page of what was reported names tests that are there."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_row_names_tests_that_exist() -> None:
    text = (ROOT / "docs" / "reported.md").read_text()
    rows = [line for line in text.splitlines() if line.startswith("| ") and "---" not in line]
    rows = [row for row in rows if not row.startswith("| kind")]
    assert len(rows) > 20
    for row in rows:
        files = re.findall(r"`(tests/[\w/]+\.py)`", row)
        assert files and all((ROOT / file).is_file() for file in files), row
