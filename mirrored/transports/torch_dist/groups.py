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
from ..faults.turns import check, claim_main_thread
from ..faults.watch import Watch, WatchedCall, reason_of
from . import children
from .launcher import init_from_environment, let_workers_finish
from .overdue import OverdueWatcher
from .sockets import Sockets

T = TypeVar("T")


@dataclass(eq=False)
class GroupState:
    """State of one default process group ("world"): its sockets, the NCCL groups made in it.

    ``world()`` returns the state of the present group. It is dropped when the group is destroyed.
    """

    rank: int = 0
    size: int = 1
    uses_nccl: bool = False
    may_measure: bool = True  # ranks may measure whether shared memory or messages are faster
    overdue: OverdueWatcher | None = None  # only if it has GPUs and goes on when ranks are lost
    is_child: bool = False  # this process is a child of the rank `rank`
    watch: Watch | None = None  # None in a world of one rank, and in a child
    sockets: Sockets | None = None  # None where `watch` is
    store: LimitedStore | None = None  # None where `watch` is
    groups: dict[Ranks, Any] = field(default_factory=dict)
    agreed_texts: dict[str, str] = field(default_factory=dict)  # results of `agreed`, by name
    # Functions that close the watch, the sockets and the NCCL groups.
    finalizers: list[Callable[[], Any]] = field(default_factory=list)

    def check_reachable(self, ranks: Ranks) -> None:
        """Raise RuntimeError if this process cannot communicate with ``ranks``.

        That is so in a child process of a rank, for ranks that this process group does not have,
        and once any rank has given up.
        """
        if len(ranks) < 2:
            return
        if self.is_child:
            children.refuse_in_child(self.rank, ranks)
        if max(ranks) >= self.size and dist.is_initialized():
            raise RuntimeError(
                f"ranks {tuple(ranks)} are to communicate, and this process group has ranks 0 to "
                f"{self.size - 1}.\n"
                "  They are of a process group before, which was destroyed.\n"
                "  Make tensors and modules again on a placement of ranks that are here."
            )
        if self.watch is not None:
            self.watch.check()

    def run_watched(self, name: str, x: Tensor, ranks: Ranks, messages: Callable[[], T]) -> T:
        """Return the result of ``messages()``, which sends or waits for messages of one call.

        ``name``, ``x`` (what is sent) and ``ranks`` describe the call. If a rank waits in vain, all
        ranks raise a RuntimeError that contains these and says where each rank is.
        """
        if self.watch is None:
            if self.is_child:  # the handle was started by its parent, before the fork
                children.refuse_in_child(self.rank, ranks)
            return messages()
        check()
        result = self.watch.run_watched(WatchedCall(name, x.dtype, tuple(x.shape), ranks), messages)
        if self.overdue is not None and x.is_cuda:
            self.overdue.record_message()
        return result

    def agreed(self, name: str, make: Callable[[], str]) -> str:
        """Return a text that is the same on all ranks: that of the rank that requests it first.

        The first rank to request ``name`` enters the result of its ``make()`` in the store, and the
        others read it there, so no rank waits for another. A child process of a rank reaches no
        other rank, and gets the result of its own ``make()``.
        """
        if name not in self.agreed_texts:
            own_text = make()
            self.agreed_texts[name] = (
                own_text if self.store is None else self._agree_in_store(name, own_text, self.store)
            )
        return self.agreed_texts[name]

    def _agree_in_store(self, name: str, own_text: str, store: LimitedStore) -> str:
        """Return the text in the store under ``name``; write ``own_text`` first if there is none.

        If the store does not answer in time, all ranks raise.
        """
        assert self.watch is not None
        # The size is in the key: successive worlds over one store may differ in it.
        part = store.with_prefix(f"mirrored/agreed/{self.size}")
        try:
            agreed_text: bytes = part.ask(
                lambda store: store.compare_set(name, "", own_text), check=self.watch.check
            )
        except RuntimeError as error:
            why = f"rank {self.rank} got no answer of the process group's store"
            raise RuntimeError(self.watch.give_up(why + reason_of(error))) from error
        return agreed_text.decode()

    def sockets_to(self, ranks: Ranks) -> Sockets:
        """Return the sockets by which this process sends messages to ``ranks``.

        Raises RuntimeError in a child of a rank, or if torch.distributed is not initialised.
        """
        if self.is_child:
            children.refuse_in_child(self.rank, ranks)
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
        if len(members) == self.size and self.uses_nccl:
            return dist.group.WORLD
        group = self.groups.get(members)
        if group is None:
            make = partial(_make_nccl_group, members, members.index(self.rank))
            group = self.run_watched("finding each other", torch.empty(0), members, make)
            self.groups[members] = group
        return group

    def may_lose_ranks(self) -> None:
        """Prepare this process to go on in another world when a rank of this one is lost.

        With NCCL this starts a thread that detects messages that do not arrive (``overdue.py``).
        """
        if self.uses_nccl and self.watch is not None:
            limit_s = timeout("cuda").total_seconds()
            self.overdue = OverdueWatcher(self.rank, self.watch, self._nccl_groups, limit_s)
            self.finalizers.insert(0, self.overdue.close)

    def _nccl_groups(self) -> list[Any]:
        default_group: Any = dist.group.WORLD
        return [default_group._get_backend(torch.device("cuda")), *self.groups.values()]


# Called when a new default process group is first used: a decision that ranks made together belongs
# to the old group, and a process that has joined since does not know it.
new_group_callbacks: list[Callable[[], None]] = []

_SINGLE_RANK_STATE = GroupState()
_states: weakref.WeakKeyDictionary[dist.ProcessGroup, GroupState] = weakref.WeakKeyDictionary()
_making_lock = threading.RLock()
# How often this process made each group, over all its worlds. The number is in the name under which
# members find each other; it is the same on all of them, since they make the group together.
_group_counts: collections.Counter[Ranks] = collections.Counter()
# The last group and its world, both weak: every op needs them, and a lookup by weak key is slower.
_latest_state: tuple[Callable[[], Any], Callable[[], GroupState | None]] = (
    (lambda: None),
    (lambda: None),
)


def world() -> GroupState:
    """Return the state of the default process group.

    If torchrun or a similar launcher started this process and there is no group yet, initialize the
    group first. Without a launcher and a group it is a world of one rank.
    """
    process_group = c10d.GroupMember.WORLD
    if process_group is None:
        if not children.started_by_launcher():
            return _child_state() if children.is_child_of_rank() else _SINGLE_RANK_STATE
        init_from_environment()
        process_group = c10d.GroupMember.WORLD
        assert process_group is not None
    global _latest_state
    group_ref, state_ref = _latest_state
    if group_ref() is process_group and (state := state_ref()) is not None:
        return state
    with _making_lock:
        if process_group not in _states:
            if not _states:
                atexit.register(let_workers_finish)
            claim_main_thread()
            failures.reset_failures()
            _states[process_group] = _make_state(process_group)
            for call in new_group_callbacks:
                call()
        new_state = _states[process_group]
        _latest_state = weakref.ref(process_group), weakref.ref(new_state)
    return new_state


def _make_watch(state: GroupState, alarm: Any, sockets: Sockets, store: LimitedStore) -> Watch:
    """Make the ``Watch`` of the world ``state``, by which ``sockets`` connects to other ranks."""
    default_store: Any = c10d._get_default_store()
    # The innermost store is the TCPStore, which knows the host that it is on.
    while hasattr(default_store, "underlying_store"):
        default_store = default_store.underlying_store
    part = store.with_prefix(f"mirrored/faults/{state.size}")
    own_rank = Rank(state.rank, state.size, part, getattr(default_store, "host", None))
    watch = Watch(own_rank, alarm, sockets.receive_through)
    sockets.join(watch)
    return watch


def _child_state() -> GroupState:
    """Return the state for a process that was started by a rank and inherited its environment.

    A child of ``multiprocessing`` gets the rank's number, but may not communicate. A separate
    program is a world of one rank.
    """
    if multiprocessing.parent_process() is None:
        return _SINGLE_RANK_STATE  # a separate program
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    return GroupState(rank, size, is_child=True)


def _make_state(group: dist.ProcessGroup) -> GroupState:
    """Make the state of ``group``, a default process group that is used for the first time."""
    backends = dist.get_backend_config(group)
    state = GroupState(
        rank=dist.get_rank(),
        size=dist.get_world_size(),
        uses_nccl="cuda:nccl" in backends,
        is_child=group is children.inherited,
    )
    if state.size > 1 and not state.is_child:
        keep_freed_memory()
        alarm = _C.Alarm()
        # In this order: atexit runs last in, first out, so the sockets outlive the watch.
        limit_s = timeout("cpu").total_seconds()
        state.sockets = Sockets(state.size, limit_s, alarm)
        state.store = LimitedStore(c10d._get_default_store(), limit_s)
        state.watch = _make_watch(state, alarm, state.sockets, state.store)
        interrupts.install_handler()
        for close in (state.watch.close, state.sockets.close):
            ending = weakref.finalize(group, close)
            ending.atexit = False  # both register an atexit function of their own
            state.finalizers.append(ending)
    return state


def end_world() -> None:
    """Destroy the default process group, and close its sockets and watch at once.

    ``dist.destroy_process_group`` alone would close them when the last reference to the group is
    dropped, and an error that is being handled may hold one.
    """
    group = c10d.GroupMember.WORLD
    if group is None:
        return
    state = _states.pop(group, None)
    for ending in state.finalizers if state is not None else ():
        ending()
    dist.destroy_process_group()


def existing_world() -> GroupState | None:
    """Return the state of the default process group, or None if ``world()`` has not made it yet.

    Unlike ``world()`` it never makes one, so any thread may call it.
    """
    group = c10d.GroupMember.WORLD
    return None if group is None else _states.get(group)


def reset_group_names() -> None:
    """Restart the numbers in the names under which members of NCCL groups find each other.

    Ranks of a new process group may have made different numbers of groups before, and would use
    different names. Call it only before a process group over a part of the store that no group has
    used, since the names are used again.
    """
    _group_counts.clear()


def _disable_after_fork() -> None:
    """Make the inherited worlds unusable for communication; runs in each forked child of a rank.

    The child can still read its parent's rank and size from them.
    """
    global _making_lock
    _making_lock = threading.RLock()  # a thread that the child lacks may have held the old one
    for group, state in list(_states.items()):
        state.is_child = True
        if state.watch is not None:
            state.watch.forget()
            state.watch = None
        if state.sockets is not None:
            state.sockets.forget()
            state.sockets = None
        state.store = None
        for member in (group, *state.groups.values()):
            children.keep_alive(member)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_disable_after_fork)


def _make_nccl_group(members: Ranks, position: int) -> Any:
    """Make the NCCL group of ``members``, in which this rank has ``position``.

    They find each other in the store under a name that all of them compute alike.
    """
    name = f"mirrored/cuda/{members}/{_group_counts[members]}"
    _group_counts[members] += 1
    store = c10d.PrefixStore(name, c10d._get_default_store())
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timeout("cuda")
    return dist.ProcessGroupNCCL(store, position, len(members), options)


def timeout(kind: str) -> timedelta:
    """Return the default process group's timeout for devices of type ``kind``.

    NCCL groups of some of its ranks get the same timeout.
    """
    group = dist.group.WORLD
    assert group is not None
    try:
        return group._get_backend(torch.device(kind)).options._timeout  # type: ignore[attr-defined]
    except (RuntimeError, AttributeError):
        return c10d.default_pg_timeout  # the default group has no backend for this kind
