"""A public report with a program of our own: what goes wrong, and the same program in each world.

```
@report("pytorch/pytorch", 162692, "Incorrect results of DTensor.mean with uneven sharding",
        said="each rank's mean counts alike")
def mean_of_uneven_shards(w: World) -> Any:
    return w.lay(rand(3, 4), S(0)).mean()
```

It runs on one process (``Alone``), on two ranks (``Here``), and with torch's DTensor (``There``),
or with what ``there`` names, where torch itself is what the report is about.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Program = Callable[[Any], Any]

SAME = "the same program over DTensor"


@dataclass(frozen=True)
class Report:
    """
    Args:
        repository: owner and name.
        number: of the issue or pull request there.
        title: as it stands there.
        said: what goes wrong, as the report says it, in few words.
        program: our own, which returns what is compared.
        there: ``SAME``, another program for torch's own classes; None: what goes wrong there does
            so in another library, or would leave ranks waiting.
        refused: the error that is raised here, where the program is one that cannot be right.
    """

    repository: str
    number: int
    title: str
    said: str
    program: Program
    there: Program | str | None
    refused: type[Exception] | None = None

    @property
    def name(self) -> str:
        return f"{self.repository.rpartition('/')[2]} {self.number}"

    @property
    def place(self) -> str:
        """Where the program stands."""
        file = inspect.getsourcefile(self.program)
        assert file is not None
        return f"tests/reported/{file.rpartition('/')[2]}"


REPORTS: list[Report] = []


def report(
    repository: str,
    number: int,
    title: str,
    *,
    said: str,
    there: Program | str | None = SAME,
    refused: type[Exception] | None = None,
) -> Callable[[Program], Program]:
    """Enter a report with the program that is decorated."""

    def enter(program: Program) -> Program:
        REPORTS.append(Report(repository, number, title, said, program, there, refused))
        return program

    return enter
