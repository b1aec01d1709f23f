"""Makes the memory segment in /dev/shm that ranks of one host share.

Either all members of a group of ranks map it, or none.
"""

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


class CreatedSegment(NamedTuple):
    """Result of ``make``: the segment that a group of ranks shares, or why there is none.

    Attributes:
        hosts: the host of each member.
        group: the members' shared segment (``_C.Group``); None if they share no memory.
        are_apart: whether they share none because they are on several hosts.
    """

    hosts: Sequence[str]
    group: Any = None
    are_apart: bool = False


def make(messages: TorchDist, ranks: Ranks, slot_bytes: int, timeout_s: float) -> CreatedSegment:
    """Make the segment of ``ranks``, or find that they cannot share one. A collective.

    The first member creates the segment and the others map it; they exchange its name and their
    errors by ``messages``, since they share no memory yet. If it fails on any of them, they warn.
    They do not warn if shared memory is switched off or they are on several hosts.

    Args:
        messages: the transport of messages between them.
        ranks: the members.
        slot_bytes: the bytes that a member writes at once.
        timeout_s: how long a member waits for others in the segment.
    """
    me, group, fault = ranks.index(messages.rank), None, ""
    watch = messages.watch
    rest = timeout_s, watch.alarm, watch.give_up, partial(_with_places, ranks)
    wanted = is_wanted(ranks)
    # Divisible into a part for each rank, of whole cache lines (64 bytes).
    slot = slot_bytes // (64 * len(ranks)) * (64 * len(ranks))
    name = None
    if wanted and me == 0:
        group, fault = _attempt(None, me, ranks, slot, *rest)
        name = group.name if group else None
    try:
        told = messages.gather_objects((is_switched_on(), host(), name, fault), ranks)
        hosts = [note[1] for note in told]
        # From here on every member has the same notes, and so takes the same branch.
        are_on = all(note[0] for note in told)
        if are_on and len(set(hosts)) > 1:
            return CreatedSegment(hosts, are_apart=True)
        if not (are_on and wanted):
            return CreatedSegment(hosts)
        name, fault = told[0][2:]
        if name is not None and me > 0:
            group, fault = _attempt(name, me, ranks, slot, *rest)
        # No member may wait in the segment before this returns: only then have all joined it.
        faults = messages.gather_objects(fault, ranks)
        if group is None or any(faults):
            warn(ranks, "memory", next(filter(None, faults)), CURE)
            return CreatedSegment(hosts)
        return CreatedSegment(hosts, group)
    finally:
        _unlink(group, me)


def _with_places(ranks: Ranks, group: Any, text: str) -> str:
    """Return the error message ``text`` with a line for each of ``ranks`` that says where it is.

    The native code of ``group`` calls this on all ranks when their calls do not match, and all
    raise the result.
    """
    places = map(pickle.loads, group.gather_objects(pickle.dumps(place_of())))
    first, _, rest = text.partition("\n")
    lines = [f"    rank {rank}: {place}" for rank, place in zip(ranks, places)]
    return raised_together("\n".join([first, *lines, rest]))


def grow(group: Any, nbytes: int, ranks: Ranks, messages: Transport) -> bool:
    """Make a larger segment with ``nbytes`` for each member; return whether all members mapped it.

    If one could not, all stay with the old segment. A collective over ``ranks``, the members of
    ``group``, which exchange the name of the new segment by ``messages``.
    """
    nbytes, me = 1 << (nbytes - 1).bit_length(), ranks.index(messages.rank)
    name, fault = _grown(group, None, nbytes) if me == 0 else (None, "")
    try:
        name, fault = messages.gather_objects((name, fault), ranks)[0]
        if name is not None and me > 0:
            name, fault = _grown(group, name, nbytes)
        faults = [each for each in messages.gather_objects(fault, ranks) if each]
        if faults:
            # Also on members that have mapped it: all must use the same segment.
            group.shrink()
            warn(ranks, "memory", faults[0], CURE)
        return not faults
    finally:
        _unlink(group, me)


def _unlink(group: Any, me: int) -> None:
    """Remove the name of the segment that the first member has created; mapped memory stays.

    Called when all members have mapped it, and also if their exchange raises: an error that is kept
    would keep the group alive, and a process that is then killed would leave the segment behind.
    """
    if me == 0 and group is not None:
        group.unlink()


def is_switched_on() -> bool:
    """Return whether this rank may share memory: CONSISTENT_SHARED_MEMORY is not 0."""
    return os.environ.get(SWITCH, "1") != "0"


def is_wanted(ranks: Sequence[int]) -> bool:
    """Return whether ``ranks`` should share memory if they are on one host.

    They should if shared memory is switched on and they are at most 64.
    """
    return is_switched_on() and len(ranks) <= MOST_RANKS


def host() -> str:
    """Return a name that is equal for ranks that can share memory.

    CONSISTENT_HOST in the environment of some ranks separates them from others on the same machine.
    """
    return f"{_C.host_identity()} {os.environ.get(HOST, '')}"


def warn(ranks: Ranks, what: str, fault: str, instead: str) -> None:
    """Warn that ``ranks`` cannot share ``what`` and send messages instead.

    ``fault`` is the reason and ``instead`` the remedy in the warning.
    """
    warnings.warn(
        f"ranks {ranks} cannot share {what}: {fault}.\n"
        "  They send messages instead, which is slower.\n"
        f"  {instead}, or set {SWITCH}=0 to say that it is meant.",
        stacklevel=2,
    )


def _grown(group: Any, name: str | None, nbytes: int) -> tuple[str | None, str]:
    """Replace the group's shared memory by a larger segment; every rank of the group calls this.

    One rank passes None as ``name`` and creates the segment. The others pass the name that it
    returned, and map that segment. Returns (the segment's name, ``""``), or (None, text of the
    error).
    """
    try:
        return group.grow(name, nbytes), ""
    except RuntimeError as error:
        return None, str(error)


def _attempt(name: str | None, *rest: Any) -> tuple[Any, str]:
    """Create a segment if ``name`` is None, else map the one called ``name``.

    ``rest`` are further arguments of ``_C.Group``. Returns (``_C.Group``, ``""``), or (None, text
    of the error).
    """
    try:
        if name is None:
            # Segments whose creators died before they unlinked them.
            _C.remove_abandoned()
        return _C.Group(name, *rest), ""
    except RuntimeError as error:
        return None, str(error)
