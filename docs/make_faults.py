"""Writes docs/faults.md: what every rank raises when one goes astray. `python docs/make_faults.py`.

It runs the programs of tests/faults, as tests/faults/test_faults.py does.
"""

from __future__ import annotations

import inspect
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
os.environ.setdefault("FAULTS_T", "5")  # enough for a machine that does something else too

from tests.faults import programs  # noqa: E402
from tests.faults.programs import FINE, PROGRAMS, RANKS  # noqa: E402
from tests.faults.setting import T  # noqa: E402
from tests.faults.worlds import Outcome, World, run  # noqa: E402

FAULTS = [name for name in PROGRAMS if name not in FINE]

HEAD = """# When a rank waits in vain

Written by `python docs/make_faults.py`, which runs the programs of `tests/faults/programs.py` with
a time-out of {limit:.0f} s. One rank goes astray; who waits for it gives up when the time is up, or
at once where it sees that a rank has ended, and *every* rank raises the one message that says where
each of them is: at once where it waits, else when it communicates next. Nothing is noted while all
is well: line, op and boxing are read off a rank's stack when another one asks
(`mirrored/transports/faults/`).

On one host the ranks share memory, and calls that do not fit are found before anything is sent: all
raise at once, and the next call works. On two hosts (two ranks and one) they send messages; a
message that does not fit is never taken, so both sides wait. The last lines of each message, which
say what to do, are left out; a group that was given up stays broken on all its ranks.

`print(x)` on one rank is no fault: it communicates nothing. A forked child of a rank that tries to
communicate raises at once, and its parent goes on (`tests/mirrored/transports/test_children.py`).

"""


def heading(name: str) -> str:
    line = inspect.getsourcelines(PROGRAMS[name])[1]
    return f"## {name.replace('_', ' ')} (programs.py:{line})"


def ranks_of(world: World) -> str:
    return f"| {world.ranks}, {'one host' if world.hosts == 1 else 'two hosts'} |"


def shown(world: World, found: list[Outcome]) -> str:
    """A row: on which ranks, when each raised, and the words."""
    words = next(each.words or each.again for each in found if each.raised)
    lines = [line for line in words.splitlines() if not re.match(r"  \S", line)]
    text = "<br>".join(short(line) for line in lines)
    when = "<br>".join(f"rank {rank} {said(each)}" for rank, each in enumerate(found))
    return f"{ranks_of(world)} {when} | {text} |"


def said(each: Outcome) -> str:
    if each.raised:
        return f"{each.raised} after {each.seconds:.1f} s"
    return f"ends ({each.status})" if not each.value else "goes on"


def short(line: str) -> str:
    line = line.replace(f"{Path(programs.__file__)}", "programs.py").strip()
    line = re.sub(r"process \d+", "process N", line)
    line = re.sub(r"\[127[\d.]+\]:\d+", "[address]", line)
    return line.replace("|", "\\|").replace("<", "&lt;").replace(">", "&gt;")


def main() -> None:
    worlds = [World(name, n, hosts) for name in FAULTS for n, hosts in RANKS[name]]
    outcomes = dict(zip(worlds, run(worlds), strict=True))
    parts = [HEAD.format(limit=T)]
    for name in FAULTS:
        rows = [(world, outcomes[world]) for world in worlds if world.program == name]
        parts.append(f"{heading(name)}\n\n")
        parts.append("| ranks | each raises | message |\n| --- | --- | --- |\n")
        parts.append("\n".join(shown(*row) for row in rows) + "\n\n")
    (ROOT / "docs" / "faults.md").write_text("".join(parts).rstrip() + "\n")


if __name__ == "__main__":
    main()
