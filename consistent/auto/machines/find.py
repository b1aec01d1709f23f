"""Lookup of a machine by name or by file."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from ...spec.nearest import suggestion
from .known import KNOWN
from .machine import Machine
from .this_machine import ThisMachine, this_machine

THIS = "this"


def machine(x: str | Path | Machine) -> Machine:
    """Return the machine that ``x`` names: a built-in name, a YAML file, or "this".

    Built-in names are like "a100-8"; "this" is the CPU of this host, which is measured. A
    ``Machine`` is returned as it is.

    Raises:
        ValueError: there is no such name and no such file, or the file contains a wrong figure.
    """
    if isinstance(x, Machine):
        return x
    if str(x) == THIS:
        return _measured_this_machine()
    if str(x) in KNOWN:
        return KNOWN[str(x)]
    if Path(x).is_file():
        return Machine.load(x)
    known = (*KNOWN, THIS)
    raise ValueError(
        f"machine: {str(x)!r} is neither a file nor a machine that is built in."
        f"{suggestion(str(x), known)} There are {', '.join(known)}; "
        "Machine.save(path) writes a file to start from."
    )


@lru_cache
def _measured_this_machine() -> ThisMachine:
    return this_machine()
