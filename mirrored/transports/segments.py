"""Making the segment that ranks of one host share: all members map it, or none keeps it."""

from __future__ import annotations

import os
import warnings
from typing import Any

from ..comm import Ranks, Transport
from . import _C  # pyright: ignore[reportAttributeAccessIssue]

SWITCH = "CONSISTENT_SHARED_MEMORY"
MOST_RANKS = 64


def make(messages: Transport, ranks: Ranks, slot_bytes: int, timeout_s: float) -> Any:
    """The members' meeting place (`_C.Group`); None where there is none, with a warning unless it
    is as it should be. Made by the first member, mapped by the others; they agree by `messages`."""
    me, group, fault = ranks.index(messages.rank), None, ""
    wanted = os.environ.get(SWITCH, "1") != "0" and len(ranks) <= MOST_RANKS
    slot = slot_bytes // (64 * len(ranks)) * (64 * len(ranks))
    name = None
    if wanted and me == 0:
        group, fault = _attempt(None, me, ranks, slot, timeout_s)
        name = group.name if group else None
    told = messages.gather_objects((wanted, _C.host_identity(), name, fault), ranks)
    if not all(note[0] for note in told) or len({note[1] for note in told}) > 1:
        return None  # switched off, or on several hosts
    name, fault = told[0][2:]
    if name is not None and me > 0:
        group, fault = _attempt(name, me, ranks, slot, timeout_s)
    faults = messages.gather_objects(fault, ranks)
    if group is None or any(faults):
        warn(ranks, "memory", next(filter(None, faults)), "Make room in /dev/shm")
        return None
    if me == 0:
        group.unlink()
    return group


def grow(group: Any, nbytes: int, ranks: Ranks, messages: Transport) -> bool:
    """Whether all members could map a segment with a place of `nbytes` for each."""
    nbytes, me = 1 << (nbytes - 1).bit_length(), ranks.index(messages.rank)
    name, fault = _grown(group, None, nbytes) if me == 0 else (None, "")
    name, fault = messages.gather_objects((name, fault), ranks)[0]
    if name is not None and me > 0:
        name, fault = _grown(group, name, nbytes)
    faults = [each for each in messages.gather_objects(fault, ranks) if each]
    if faults:
        group.shrink()
        warn(ranks, "memory", faults[0], "Make room in /dev/shm")
        return False
    if me == 0:
        group.unlink()
    return True


def warn(ranks: Ranks, what: str, fault: str, instead: str) -> None:
    """That these ranks send messages, and why."""
    warnings.warn(
        f"ranks {ranks} cannot share {what}: {fault}.\n"
        "  They send messages instead, which is slower.\n"
        f"  {instead}, or set {SWITCH}=0 to say that it is meant.",
        stacklevel=2,
    )


def _grown(group: Any, name: str | None, nbytes: int) -> tuple[str | None, str]:
    """The name of the larger segment, or why there is none."""
    try:
        return group.grow(name, nbytes), ""
    except RuntimeError as error:
        return None, str(error)


def _attempt(name: str | None, *rest: Any) -> tuple[Any, str]:
    """The group and why there is none."""
    try:
        if name is None:
            _C.remove_abandoned()
        return _C.Group(name, *rest), ""
    except RuntimeError as error:
        return None, str(error)
