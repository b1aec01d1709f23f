"""State that belongs to the default process group: sockets, watch, and NCCL groups of some ranks.

NCCL groups are made here and not by ``new_group``. They are made lazily, when only the members can
take part, and with ``use_local_synchronization=True`` torch 2.13 names a group by how many groups
the process has seen so far. If that number differs between members, they wait for each other under
different names.
"""

from __future__ import annotations

import atexit
import collections
import multiprocessing
import os
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch import Tensor

from ...comm import Ranks
from ...freed_memory import keep_freed_memory
from .. import _C, failures  # pyright: ignore[reportAttributeAccessIssue]
from ..faults import interrupts
from ..faults.directory import Rank
from ..faults.store import LimitedStore
from ..faults.turns import begin, check
from ..faults.watch import Watch, WatchedCall, reason_of
from . import children
from .launcher import init_from_environment, let_workers_finish
from .overdue import Overdue
from .sockets import Sockets

T = TypeVar("T")


@dataclass(eq=False)
class GroupState:
    """State of one default process group ("world"): its sockets, the NCCL groups made in it.

    ``world()`` returns that of the present group. It is dropped when the group is destroyed.
    """

    rank: int = 0
    size: int = 1
    nccl: bool = False
    measures: bool = True  # ranks may measure whether shared memory or messages are faster
    overdue: Overdue | None = None  # only if it has GPUs and goes on when ranks are lost
    is_childs: bool = False  # this process is a child of the rank `rank`
    watch: Watch | None = None  # None in a world of one rank, and in a child
    sockets: Sockets | None = None  # None where `watch` is
    store: LimitedStore | None = None  # None where `watch` is
    groups: dict[Ranks, Any] = field(default_factory=dict)
    known: dict[str, str] = field(default_factory=dict)  # results of `agreed`, by name
    # Functions that close the watch, the sockets and the NCCL groups.
    endings: list[Callable[[], Any]] = field(default_factory=list)

    def check_reachable(self, ranks: Ranks) -> None:
        """Raise RuntimeError if this process cannot communicate with ``ranks``.

        That is so in a child process of a rank, for ranks that this process group does not have,
        and once any rank has given up.
        """
        if len(ranks) < 2:
            return
        if self.is_childs:
            children.refuse(self.rank, ranks)
        if max(ranks) >= self.size and dist.is_initialized():
            raise RuntimeError(
                f"ranks {tuple(ranks)} are to communicate, and this process group has ranks 0 to "
                f"{self.size - 1}.\n"
                "  They are of a process group before, which was destroyed.\n"
                "  Make tensors and modules again on a placement of ranks that are here."
            )
        if self.watch is not None:
            self.watch.check()

    def carry_out(self, name: str, x: Tensor, ranks: Ranks, messages: Callable[[], T]) -> T:
        """Return the result of ``messages()``, which sends or waits for messages of one call.

        ``name``, ``x`` (what is sent) and ``ranks`` describe the call. If a rank waits in vain, all
        ranks raise a RuntimeError that contains these and says where each rank is.
        """
        if self.watch is None:
            if self.is_childs:  # the handle was started by its parent, before the fork
                children.refuse(self.rank, ranks)
            return messages()
        check()
        found = self.watch.carry_out(WatchedCall(name, x.dtype, tuple(x.shape), ranks), messages)
        if self.overdue is not None and x.is_cuda:
            self.overdue.passed()
        return found

    def agreed(self, name: str, make: Callable[[], str]) -> str:
        """Return a text that is the same on all ranks: that of the first rank that asks for it.

        The first rank to ask for ``name`` enters the result of its ``make()`` in the store, and the
        others read it there, so no rank waits for another. A child process of a rank reaches no
        other rank, and gets the result of its own ``make()``.
        """
        if name not in self.known:
            mine = make()
            self.known[name] = mine if self.store is None else self._entered(name, mine, self.store)
        return self.known[name]

    def _entered(self, name: str, mine: str, store: LimitedStore) -> str:
        """Return the text in the store under ``name``; write ``mine`` first if there is none.

        If the store does not answer in time, all ranks raise.
        """
        assert self.watch is not None
        # The size is in the key: successive worlds over one store may differ in it.
        part = store.part(f"mirrored/agreed/{self.size}")
        try:
            found: bytes = part.ask(
                lambda store: store.compare_set(name, "", mine), check=self.watch.check
            )
        except RuntimeError as error:
            why = f"rank {self.rank} got no answer of the process group's store"
            raise RuntimeError(self.watch.give_up(why + reason_of(error))) from error
        return found.decode()

    def sockets_to(self, ranks: Ranks) -> Sockets:
        """Return the sockets by which this process sends messages to ``ranks``.

        Raises RuntimeError in a child of a rank, or if torch.distributed is not initialised.
        """
        if self.is_childs:
            children.refuse(self.rank, ranks)
        if self.sockets is None:
            raise RuntimeError(
                f"torch.distributed is not initialised, and ranks {tuple(ranks)} are to "
                "communicate.\n"
                "  Without it this process is rank 0 of 1 and reaches no other rank.\n"
                '  Call torch.distributed.init_process_group("gloo") first, or start under '
                "torchrun."
            )
        return self.sockets

    def group(self, ranks: Ranks) -> Any:
        """Return the NCCL process group of ``ranks``; the first call, a collective, makes it.

        Its members are sorted by rank. So if ``ranks`` are in another order, the caller must
        permute the pieces that it passes to the group.
        """
        members = tuple(sorted(ranks))
        if len(members) == self.size and self.nccl:
            return dist.group.WORLD
        group = self.groups.get(members)
        if group is None:
            make = partial(_make_group, members, members.index(self.rank))
            group = self.carry_out("finding each other", torch.empty(0), members, make)
            self.groups[members] = group
        return group

    def may_lose_ranks(self) -> None:
        """Prepare this process to go on in another world when a rank of this one is lost.

        With NCCL this starts a thread that detects messages that do not arrive (``overdue.py``).
        """
        if self.nccl and self.watch is not None:
            limit_s = timeout("cuda").total_seconds()
            self.overdue = Overdue(self.rank, self.watch, self._groups_of_nccl, limit_s)
            self.endings.insert(0, self.overdue.close)

    def _groups_of_nccl(self) -> list[Any]:
        whole: Any = dist.group.WORLD
        return [whole._get_backend(torch.device("cuda")), *self.groups.values()]


# Called when a new default process group is first used: a decision that ranks made together belongs
# to the old group, and a process that has joined since does not know it.
when_new: list[Callable[[], None]] = []

_ALONE = GroupState()
_worlds: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
_making = threading.RLock()
# How often this process made each group, over all its worlds. The number is in the name under which
# members find each other; it is the same on all of them, since they make the group together.
_made: collections.Counter[Ranks] = collections.Counter()
# The last group and its world, both weak: every op needs them, and a lookup by weak key is slower.
_latest: tuple[Callable[[], Any], Callable[[], GroupState | None]] = (lambda: None), (lambda: None)


def world() -> GroupState:
    """Return the state of the default process group.

    If torchrun or a similar launcher started this process and there is no group yet, initialize the
    group first. Without a launcher and a group it is a world of one rank.
    """
    found = c10d.GroupMember.WORLD
    if found is None:
        if not children.started_by_launcher():
            return _childs_world() if children.is_child_of_rank() else _ALONE
        init_from_environment()
        found = c10d.GroupMember.WORLD
        assert found is not None
    global _latest
    group, latest = _latest
    if group() is found and (known := latest()) is not None:
        return known
    with _making:
        if found not in _worlds:
            if not _worlds:
                atexit.register(let_workers_finish)
            begin()
            failures.forget()
            _worlds[found] = _world_of(found)
            for call in when_new:
                call()
        made = _worlds[found]
        _latest = weakref.ref(found), weakref.ref(made)
    return made


def _watch_of(made: GroupState, alarm: Any, sockets: Sockets, store: LimitedStore) -> Watch:
    """Make the ``Watch`` of the world ``made``, by which ``sockets`` connects to other ranks."""
    whole: Any = c10d._get_default_store()
    # The innermost store is the TCPStore, which knows the host that it is on.
    while hasattr(whole, "underlying_store"):
        whole = whole.underlying_store
    part = store.part(f"mirrored/faults/{made.size}")
    me = Rank(made.rank, made.size, part, getattr(whole, "host", None))
    watch = Watch(me, alarm, sockets.arrive_by)
    sockets.join(watch)
    return watch


def _childs_world() -> GroupState:
    """Return the state for a process that was started by a rank and inherited its environment.

    A child of ``multiprocessing`` gets the rank's number, but may not communicate. A separate
    program is a world of one rank.
    """
    if multiprocessing.parent_process() is None:
        return _ALONE  # a separate program
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return GroupState(rank, size, is_childs=True)


def _world_of(group: dist.ProcessGroup) -> GroupState:
    """Make the state of ``group``, a default process group that is used for the first time."""
    backends = dist.get_backend_config(group)
    made = GroupState(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        nccl="cuda:nccl" in backends,
        is_childs=group is children.inherited,
    )
    if made.size > 1 and not made.is_childs:
        keep_freed_memory()
        alarm = _C.Alarm()
        # In this order: atexit runs last in, first out, so the sockets outlive the watch.
        limit_s = timeout("cpu").total_seconds()
        made.sockets = Sockets(made.size, limit_s, alarm)
        made.store = LimitedStore(c10d._get_default_store(), limit_s)
        made.watch = _watch_of(made, alarm, made.sockets, made.store)
        interrupts.begin()
        for ends in (made.watch.close, made.sockets.close):
            ending = weakref.finalize(group, ends)
            ending.atexit = False  # both register an atexit function of their own
            made.endings.append(ending)
    return made


def end_world() -> None:
    """Destroy the default process group, and close its sockets and watch at once.

    ``dist.destroy_process_group`` alone would close them when the last reference to the group is
    dropped, and an error that is being handled may hold one.
    """
    found = c10d.GroupMember.WORLD
    if found is None:
        return
    made = _worlds.pop(found, None)
    for ending in made.endings if made is not None else ():
        ending()
    dist.destroy_process_group()


def world_now() -> GroupState | None:
    """Return the state of the default process group, or None if ``world()`` has not made it yet.

    Unlike ``world()`` it never makes one, so any thread may call it.
    """
    found = c10d.GroupMember.WORLD
    return None if found is None else _worlds.get(found)


def forget_names() -> None:
    """Restart the numbers in the names under which members of NCCL groups find each other.

    Ranks of a new process group may have made different numbers of groups before, and would use
    different names. Call it only before a process group over a part of the store that no group has
    used, since the names are used again.
    """
    _made.clear()


def _after_fork() -> None:
    """Make the inherited worlds unusable for communication; runs in each forked child of a rank.

    The child can still read its parent's rank and size from them.
    """
    global _making
    _making = threading.RLock()  # a thread that the child lacks may have held the old one
    for group, each in list(_worlds.items()):
        each.is_childs = True
        if each.watch is not None:
            each.watch.forget()
            each.watch = None
        if each.sockets is not None:
            each.sockets.forget()
            each.sockets = None
        each.store = None
        for member in (group, *each.groups.values()):
            children.keep_alive(member)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


def _make_group(members: Ranks, position: int) -> Any:
    """Make the NCCL group of ``members``, in which this rank has ``position``.

    They find each other in the store under a name that all of them compute alike.
    """
    name = f"mirrored/cuda/{members}/{_made[members]}"
    _made[members] += 1
    store = c10d.PrefixStore(name, c10d._get_default_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout("cuda")
    return dist.ProcessGroupNCCL(store, position, len(members), options)


def timeout(kind: str) -> timedelta:
    """Return the default process group's timeout for devices of type ``kind``.

    NCCL groups of some of its ranks get the same timeout.
    """
    found = dist.group.WORLD
    assert found is not None
    try:
        return found._get_backend(torch.device(kind)).options._timeout  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return c10d.default_pg_timeout  # the default group has no backend for this kind
