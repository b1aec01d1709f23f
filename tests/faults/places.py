"""Where each rank of a program is, as the program's comments say."""

from __future__ import annotations

import inspect
import re

from tests.faults import programs
from tests.faults.programs import INSTEAD, PROGRAMS


def places(name: str, n: int) -> dict[int, list[str]]:
    """What is said of each rank that has a line: `file:line in `, op and boxing."""
    lines, first = inspect.getsourcelines(PROGRAMS[name])
    found: dict[str, list[str]] = {}
    for k, line in enumerate(lines):
        if here := re.search(r"# here: ([\w ]+?)(?: in (.*))?$", line):
            doing = here.group(2).split(", ") if here.group(2) else []
            for rank in here.group(1).split():
                found[rank] = [f"{programs.__file__}:{first + k} in ", *doing]
    said = {rank: found.get(str(rank)) or found.get("others") for rank in range(n)}
    return {rank: words for rank, words in said.items() if words and rank not in INSTEAD[name]}
