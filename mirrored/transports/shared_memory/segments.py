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
from ..faults.place import describe_place
from ..torch_dist import TorchDist

SWITCH = "CONSISTENT_SHARED_MEMORY"
HOST = "CONSISTENT_HOST"
MAX_RANKS = 64
REMEDY = "Mount /dev/shm so that ranks can write in it, and make room in it"


class CreatedSegment(NamedTuple):
    """Result of ``make_segment``: the segment that a group of ranks shares, or why there is none.

    Attributes:
        hosts: the host of each member.
        group: the members' shared segment (``_C.Group``); None if they share no memory.
        are_on_several_hosts: whether they share none because they are on several hosts.
    """

    hosts: Sequence[str]
    group: Any = None
    are_on_several_hosts: bool = False


def make_segment(
    messages: TorchDist, ranks: Ranks, slot_bytes: int, timeout_s: float
) -> CreatedSegment:
    """Create a segment of shared memory for ``ranks``, or find that they cannot share one.

    A collective of ``ranks``. The first one creates the segment and the others map it; they
    exchange its name and their errors by ``messages``, since they share no memory yet. If one of
    them fails, all warn, unless shared memory is switched off or they are on several hosts.

    Args:
        messages: the transport of messages between them.
        ranks: the ranks that share the segment, its members.
        slot_bytes: the most that a member can write at a time.
        timeout_s: how long a member waits for others in the segment.
    """
    position, group, fault = ranks.index(messages.rank), None, ""
    watch = messages.watch
    group_args = timeout_s, watch.alarm, watch.give_up, partial(_message_with_places, ranks)
    should_share = should_share_memory(ranks)
    # Divisible into a part for each rank, of whole cache lines (64 bytes).
    slot = slot_bytes // (64 * len(ranks)) * (64 * len(ranks))
    name = None
    if should_share and position == 0:
        group, fault = _try_make_group(None, position, ranks, slot, *group_args)
        name = group.name if group else None
    try:
        notes = messages.gather_objects((is_switched_on(), host(), name, fault), ranks)
        hosts = [note[1] for note in notes]
        # From here on every member has the same notes, and so takes the same branch.
        are_on = all(note[0] for note in notes)
        if are_on and len(set(hosts)) > 1:
            return CreatedSegment(hosts, are_on_several_hosts=True)
        if not (are_on and should_share):
            return CreatedSegment(hosts)
        name, fault = notes[0][2:]
        if name is not None and position > 0:
            group, fault = _try_make_group(name, position, ranks, slot, *group_args)
        # No member may wait in the segment before this returns: only then have all joined it.
        faults = messages.gather_objects(fault, ranks)
        if group is None or any(faults):
            warn(ranks, "memory", next(filter(None, faults)), REMEDY)
            return CreatedSegment(hosts)
        return CreatedSegment(hosts, group)
    finally:
        _unlink(group, position)


def _message_with_places(ranks: Ranks, group: Any, text: str) -> str:
    """Return the error message ``text`` with a line for each of ``ranks`` that says where it is.

    The native code of ``group`` calls this on all ranks when their calls do not match, and all
    raise the result.
    """
    places = map(pickle.loads, group.gather_objects(pickle.dumps(describe_place())))
    first, _, details = text.partition("\n")
    lines = [f"    rank {rank}: {place}" for rank, place in zip(ranks, places)]
    return raised_together("\n".join([first, *lines, details]))


def grow_segment(group: Any, nbytes: int, ranks: Ranks, messages: Transport) -> bool:
    """Make a larger segment with ``nbytes`` for each member; return whether all members mapped it.

    If one could not, all stay with the old segment. A collective over ``ranks``, the members of
    ``group``, which exchange the name of the new segment by ``messages``.
    """
    nbytes, position = 1 << (nbytes - 1).bit_length(), ranks.index(messages.rank)
    name, fault = _try_grow(group, None, nbytes) if position == 0 else (None, "")
    try:
        name, fault = messages.gather_objects((name, fault), ranks)[0]
        if name is not None and position > 0:
            name, fault = _try_grow(group, name, nbytes)
        faults = [each for each in messages.gather_objects(fault, ranks) if each]
        if faults:
            # Also on members that have mapped it: all must use the same segment.
            group.shrink()
            warn(ranks, "memory", faults[0], REMEDY)
        return not faults
    finally:
        _unlink(group, position)


def _unlink(group: Any, position: int) -> None:
    """Remove the name of the segment that the first member has created; mapped memory stays.

    Called when all members have mapped it, and also if their exchange raises: an error that is kept
    would keep the group alive, and a process that is then killed would leave the segment behind.
    """
    if position == 0 and group is not None:
        group.unlink()


def is_switched_on() -> bool:
    """Return whether this rank may share memory: CONSISTENT_SHARED_MEMORY is not 0."""
    return os.environ.get(SWITCH, "1") != "0"


def should_share_memory(ranks: Sequence[int]) -> bool:
    """Return whether ``ranks`` should share memory if they are on one host.

    They should if shared memory is switched on and they are at most 64.
    """
    return is_switched_on() and len(ranks) <= MAX_RANKS


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


def _try_grow(group: Any, name: str | None, nbytes: int) -> tuple[str | None, str]:
    """Replace the group's shared memory by a larger segment; every rank of the group calls this.

    One rank passes None as ``name`` and creates the segment. The others pass the name that it
    returned, and map that segment. Returns (the segment's name, ``""``), or (None, text of the
    error).
    """
    try:
        return group.grow(name, nbytes), ""
    except RuntimeError as error:
        return None, str(error)


def _try_make_group(name: str | None, *group_args: Any) -> tuple[Any, str]:
    """Create a segment if ``name`` is None, else map the one called ``name``.

    ``group_args`` are further arguments of ``_C.Group``. Returns (``_C.Group``, ``""``), or (None,
    text of the error).
    """
    try:
        if name is None:
            # Segments whose creators died before they unlinked them.
            _C.remove_abandoned()
        return _C.Group(name, *group_args), ""
    except RuntimeError as error:
        return None, str(error)
