"""Writes what the programs in the pages print: `python docs/make_pages.py [PAGE ...]`.

The pages under docs/tutorials/ are written from examples/tutorials/ first. Ranks use the built-in
table of message costs, as in the tests, so that the pages are the same on every machine.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "docs")]

from make_tutorials import tutorials  # noqa: E402

from mirrored.transports.tuning import table  # noqa: E402
from tests.docs.blocks import written  # noqa: E402

PAGES = (
    "adding_an_op", "checkpoints", "coming_from", "compile", "concepts", "five_minutes", "how_do_i",
    "index", "moving", "pipelines", "planning", "recipes", "reports",
    "when_it_goes_wrong",
)  # fmt: skip


def pages() -> list[Path]:
    """Every page whose programs are run."""
    return [*(ROOT / "docs" / f"{name}.md" for name in PAGES), *tutorials()]


def main() -> None:
    wanted = sys.argv[1:]
    made = tutorials()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["XDG_CACHE_HOME"] = folder
        for ranks in range(2, 9):
            table.save(table.Table(), ranks, table.cpu_device_name())
        for path in pages():
            if not wanted or path.stem in wanted:
                text = made[path] if path in made else path.read_text()
                path.write_text(written(text, f"{path.stem}.md"))


if __name__ == "__main__":
    main()
