"""Main program of ``python -m consistent``: selects and runs a command."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Sequence

from ..doctor import main as doctor
from . import bench, info, script, verify

USAGE = """\
usage: python -m consistent COMMAND

  info                       versions, native code, GPUs, how ranks reach each other and why,
                             and what makes this installation slow
  doctor [--json]            look for what is not well, with the cure, and let two ranks try it
  bench                      a short table of this machine: ops and boxings beside plain torch
  explain [OPTIONS] FILE [ARGUMENTS]
                             run a script and print what its global tensors did
    --html PATH              write the report as a page too
    --trace PATH             take times, and write them for ui.perfetto.dev
  verify [OPTIONS] FILE      run a file's step on one process and under plans, and name the first
                             tensor that differs
    --plan PLAN              a plan, may be repeated; --ranks N; --html PATH
  run [OPTIONS] FILE [ARGUMENTS]
                             start ranks of a program that goes on when one of them dies
    --nproc-per-node N       ranks of this host; --nnodes MIN:MAX; --max-restarts N

info and bench tell more under torchrun, and explain runs scripts of several ranks there:

  torchrun --nproc_per_node 2 -m consistent bench
"""


def _run_elastic(words: list[str]) -> int:
    # Only this command needs torch's checkpoints, whose import takes most of a second.
    from ..elastic.launch import run

    return run.main(words)


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "info": info.main,
    "doctor": doctor.main,
    "bench": bench.main,
    "explain": script.main,
    "verify": verify.main,
    "run": _run_elastic,
}


def main(words: Sequence[str]) -> int:
    """Run the command that ``words`` name, such as ["bench"]; return the exit status.

    It is 2 for an unknown command.
    """
    name, *rest = words or [""]
    if name in ("-h", "--help", "help"):
        print(USAGE, end="")
        return 0
    if name not in COMMANDS:
        return _reject_command(name)
    if name in ("info", "bench") and rest:
        if rest[0] in ("-h", "--help"):
            print(USAGE, end="")
            return 0
        print(f"consistent: {name} takes no argument, and {rest[0]!r} is given.\n", file=sys.stderr)
        print(USAGE, end="", file=sys.stderr)
        return 2
    return COMMANDS[name](rest)


def _reject_command(name: str) -> int:
    matches = difflib.get_close_matches(name, COMMANDS, n=1)
    if not name:
        print("consistent: no command is given.\n", file=sys.stderr)
    else:
        hint = f" Did you mean {matches[0]}?" if matches else ""
        print(f"consistent: {name!r} is not a command.{hint}\n", file=sys.stderr)
    print(USAGE, end="", file=sys.stderr)
    return 2
