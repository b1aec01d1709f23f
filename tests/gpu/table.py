"""The table of results that goes into docs/gpu.md; written again after each check."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path

LONGEST = 160
FIGURE = re.compile(r"\d")


@dataclass(frozen=True)
class Result:
    """How a check ended, and what its program said itself."""

    name: str
    outcome: str
    seconds: float
    said: Sequence[str] = ()

    @property
    def last(self) -> str:
        """The last line that it said, fit for a table."""
        lines = [line.strip() for line in self.said if line.strip()]
        return lines[-1][:LONGEST].replace("|", "/") if lines else ""

    @property
    def figures(self) -> list[str]:
        """Its lines that hold numbers."""
        return [line.rstrip() for line in self.said if FIGURE.search(line)]


def markdown(title: str, results: Sequence[Result], speeds: bool) -> str:
    """A table of all checks; below it, where they measure, the figures of each."""
    where = next((result.last for result in results if result.name == "machine"), "")
    lines = [
        f"**{title}, {date.today().isoformat()}.** {where}".rstrip(),
        "",
        "| check | result | s | said last |",
        "| --- | --- | --- | --- |",
        *(f"| `{r.name}` | {r.outcome} | {r.seconds:.0f} | {r.last} |" for r in results),
    ]
    for result in results if speeds else ():
        if result.figures and result.name not in ("machine", "build"):
            lines += ["", f"`{result.name}`", "", "```", *result.figures, "```"]
    return "\n".join(lines) + "\n"


def write(folder: Path, title: str, results: Sequence[Result], speeds: bool) -> None:
    """To FOLDER/table.md."""
    (folder / "table.md").write_text(markdown(title, results, speeds))
