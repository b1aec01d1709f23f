"""Places of a training at which a rank ends itself, once they are armed.

In a folder a file named like a place, which holds the name of a signal, arms it: the first rank
that comes there takes the file away and sends itself the signal; ``PLACE.PID`` is for one process.
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from consistent.checkpoint.files import pieces
from consistent.elastic.copies import PeerCopies
from mirrored.transports.shared_memory import SharedMemory

PLACES = ("loader", "forward", "backward", "boxing", "optimizer", "meeting", "taken", "save")
LOGGED = "logged"  # of the first rank: between the end of a step and its line in ``progress``

_folder: Path


def begin(folder: Path) -> None:
    """Places lie in ``folder`` from now on, those of the library among them."""
    global _folder
    _folder = folder
    for name in ("all_gather_several", "reduce_scatter_several", "all_reduce"):
        watched(SharedMemory, name, after="boxing")
    watched(PeerCopies, "commit", before="meeting", after="taken")
    watched(pieces, "write", before="save")


def at(place: str) -> None:
    """End here, if the place is armed for any process or for this one."""
    taken = _folder / f"{place} {os.getpid()}"
    for armed in (place, f"{place}.{os.getpid()}"):
        try:
            os.rename(_folder / armed, taken)
        except FileNotFoundError:
            continue
        os.kill(os.getpid(), getattr(signal, taken.read_text()))


def watched(owner: type | object, name: str, before: str = "", after: str = "") -> None:
    """Come to places before and after each call of a function."""
    function = getattr(owner, name)

    def call(*args: object, **options: object) -> object:
        if before:
            at(before)
        result = function(*args, **options)
        if after:
            at(after)
        return result

    setattr(owner, name, call)
