"""Makes the segment that ranks of one host share: all members map it, or none keeps it."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, NamedTuple

from ...comm import Ranks, Transport
from .. import _C  # pyright: ignore[reportAttributeAccessIssue]
from ..failures import raised_together
from ..faults.place import place_of
from ..torch_dist import TorchDist

SWITCH = "CONSISTENT_SHARED_MEMORY"
HOST = "CONSISTENT_HOST"
MOST_RANKS = 64
CURE = "Mount /dev/shm so that ranks can write in it, and make room in it"


class Made(NamedTuple):
    """The members' meeting place (`_C.Group`); None if they share no memory. `hosts` says where
    each is, and `are_apart` that they share none because they are on several."""

    hosts: Sequence[str]
    group: Any = None
    are_apart: bool = False


def make(messages: TorchDist, ranks: Ranks, slot_bytes: int, timeout_s: float) -> Made:
    """A meeting place, made by the first member and mapped by the others.

    There is a warning if that failed, and none if it was switched off or they are on several hosts.
    They agree by `messages`.
    """
    me, group, fault = ranks.index(messages.rank), None, ""
    watch = messages.watch
    rest = timeout_s, watch.alarm, watch.give_up, partial(_with_places, ranks)
    wanted = is_wanted(ranks)
    slot = slot_bytes // (64 * len(ranks)) * (64 * len(ranks))
    name = None
    if wanted and me == 0:
        group, fault = _attempt(None, me, ranks, slot, *rest)
        name = group.name if group else None
    told = messages.gather_objects((is_switched_on(), host(), name, fault), ranks)
    hosts = [note[1] for note in told]
    if not all(note[0] for note in told):
        return Made(hosts)
    if len(set(hosts)) > 1:
        return Made(hosts, are_apart=True)
    if not wanted:
        return Made(hosts)
    name, fault = told[0][2:]
    if name is not None and me > 0:
        group, fault = _attempt(name, me, ranks, slot, *rest)
    # No member may wait in the segment before this returns: only then have all joined it.
    faults = messages.gather_objects(fault, ranks)
    if group is None or any(faults):
        warn(ranks, "memory", next(filter(None, faults)), CURE)
        return Made(hosts)
    if me == 0:
        group.unlink()
    return Made(hosts, group)


def _with_places(ranks: Ranks, group: Any, text: str) -> str:
    """The message of all members about calls that do not fit: `text`, and where each member is."""
    places = map(pickle.loads, group.gather_objects(pickle.dumps(place_of())))
    first, _, rest = text.partition("\n")
    lines = [f"    rank {rank}: {place}" for rank, place in zip(ranks, places)]
    return raised_together("\n".join([first, *lines, rest]))


def grow(group: Any, nbytes: int, ranks: Ranks, messages: Transport) -> bool:
    """Make a segment with a place of `nbytes` for each member; whether all members mapped it."""
    nbytes, me = 1 << (nbytes - 1).bit_length(), ranks.index(messages.rank)
    name, fault = _grown(group, None, nbytes) if me == 0 else (None, "")
    name, fault = messages.gather_objects((name, fault), ranks)[0]
    if name is not None and me > 0:
        name, fault = _grown(group, name, nbytes)
    faults = [each for each in messages.gather_objects(fault, ranks) if each]
    if faults:
        group.shrink()
        warn(ranks, "memory", faults[0], CURE)
        return False
    if me == 0:
        group.unlink()
    return True


def is_switched_on() -> bool:
    """Whether this rank may share memory."""
    return os.environ.get(SWITCH, "1") != "0"


def is_wanted(ranks: Sequence[int]) -> bool:
    """Whether these ranks should share memory where they can."""
    return is_switched_on() and len(ranks) <= MOST_RANKS


def host() -> str:
    """What is equal for ranks that can share memory. CONSISTENT_HOST in the environment of some
    tells them apart from others on the same machine."""
    return f"{_C.host_identity()} {os.environ.get(HOST, '')}"


def warn(ranks: Ranks, what: str, fault: str, instead: str) -> None:
    """Warn that these ranks send messages, and why."""
    warnings.warn(
        f"ranks {ranks} cannot share {what}: {fault}.\n"
        "  They send messages instead, which is slower.\n"
        f"  {instead}, or set {SWITCH}=0 to say that it is meant.",
        stacklevel=2,
    )


def _grown(group: Any, name: str | None, nbytes: int) -> tuple[str | None, str]:
    """The name of the larger segment, or None and the reason."""
    try:
        return group.grow(name, nbytes), ""
    except RuntimeError as error:
        return None, str(error)


def _attempt(name: str | None, *rest: Any) -> tuple[Any, str]:
    """The group, or None and the reason."""
    try:
        if name is None:
            _C.remove_abandoned()
        return _C.Group(name, *rest), ""
    except RuntimeError as error:
        return None, str(error)
