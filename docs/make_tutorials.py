"""Writes docs/tutorials/ from examples/tutorials/, each a program in the format of percent cells.

`# %% [markdown]` begins a cell of text, `# %%` a cell of Python. docs/make_pages.py runs them and
adds what they print.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PROGRAMS = ROOT / "examples" / "tutorials"
PAGES = ROOT / "docs" / "tutorials"
_CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)
_LAUNCH = re.compile(r"--nproc_per_node (\d+)")


def page(program: str, name: str) -> str:
    """The page of a program, without what it prints."""
    head, *cells = _CELL.split(program)
    if head.strip() or not cells:
        raise ValueError(f"{name}: a tutorial begins with the line `# %% [markdown]`.")
    launch = _LAUNCH.search(program)
    if launch is None:
        raise ValueError(f"{name}: the first cell does not say how to launch it: torchrun ...")
    parts = [
        f"<!-- Written by docs/make_pages.py from examples/tutorials/{name}.py. -->",
        f"<!-- ranks: {launch[1]} -->",
    ]
    for kind, text in zip(cells[::2], cells[1::2], strict=True):
        parts.append(_prose(text) if kind else f"```python\n{text.strip()}\n```")
    return "\n\n".join(parts) + "\n"


def _prose(text: str) -> str:
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in text.strip().splitlines())


def tutorials() -> dict[Path, str]:
    """Page -> what stands in it, without what the programs print."""
    return {
        PAGES / f"{path.stem}.md": page(path.read_text(), path.stem)
        for path in sorted(PROGRAMS.glob("*.py"))
    }
