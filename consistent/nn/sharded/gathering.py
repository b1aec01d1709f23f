"""Gather one parameter for a run of forward, and again when backward needs it."""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ...dispatch.plans.shards import HookOff, plain
from ...movement.coded import gather_each
from ...movement.coders import Coder
from ...movement.run import run
from ...movement.sparse_parts import is_sparse, parts_of
from ...movement.world import my_coordinate
from ...spec import TensorSpec
from ...spec.tracer import Tracer
from .prefetch import Orders, find


class Gathering:
    """Gathering of one parameter in one run of forward.

    While forward runs, ``seen`` is the gathered tensor. Afterwards this object stays with autograd
    and holds what a second gather needs: the shard, its version, and the number of saved views of
    the gathered values.

    Args:
        param: the parameter, a global tensor.
        dst: the spec in which forward sees it.
        coder: its codecs; None without codecs.
        orders: the prefetch orders; None without prefetching.
        key: (the ``GatheredParameters`` that it belongs to, its position among them).
    """

    __slots__ = (
        "param", "local", "src", "dst", "coder", "orders", "key", "version",
        "seen", "writes", "storage", "aliases",
        "views", "oldest", "taken", "whole",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self, param: Any, dst: TensorSpec, coder: Coder | None, orders: Orders | None, key: Any
    ) -> None:
        self.param: Any = param  # None after release, like `seen`
        self.coder, self.orders, self.key = coder, orders, key
        self.src: TensorSpec = param._spec
        self.dst = dst
        with HookOff():
            self.local = Tensor.detach(param)  # shares storage and version counter
        self.version = self.local._version
        self.seen: Any = None
        self.views = self.taken = 0  # views that autograd saved, and that backward has taken
        self.oldest: int | None = None  # version of the gathered values at the first saved view
        self.whole: Tensor | None = None  # the gathered values, while backward keeps them

    def show(self, seen: Any) -> None:
        """Set the global tensor that forward sees, and begin to track in-place writes to it."""
        self.seen, self.writes = seen, seen._version
        self.storage, self.aliases = storage_of(plain(seen)), []
        _thread.aliases[self.storage] = self.aliases

    def hide(self) -> None:
        """Stop tracking writes to the gathered values, whose storage may be reused."""
        _thread.aliases.pop(self.storage, None)

    def release(self) -> None:
        """Drop the gathered values, after copying forward's in-place writes to the parameter.

        Each rank copies its own part, so nothing is sent.
        """
        param, seen = self.param, self.seen
        self.param = self.seen = None
        if seen._version == self.writes and not any(alias._version for alias in self.aliases):
            return
        with torch.no_grad(), HookOff():
            mine = run(plain(seen).detach(), seen._spec, param._spec)
            plain(param).detach().copy_(mine)
        # If no write came after a saved view, backward may gather the new values without an error.
        if self.oldest is None or self.oldest == seen._version:
            self.version = self.local._version

    def take(self) -> Tensor:
        """Return the gathered values for backward.

        The caller that takes the last saved view gets the only reference to them.

        Raises:
            RuntimeError: the parameter was written to since forward.
        """
        if self.local._version != self.version:
            raise modified(self.src.shape, self.local._version, self.version)
        whole = self.whole
        opens = _opens_backward()
        if opens:
            gathered, position = self.key
            gathered.opens_backward.add(position)
        if whole is None or opens:
            whole = self._gather_again(whole)
        self.taken += 1
        last = self.taken % self.views == 0  # modulo: a retained graph may run backward again
        self.whole = whole if not last and _let_go_after_backward(self) else None
        return whole

    def _gather_again(self, whole: Tensor | None) -> Tensor:
        """Return the gathered values for backward, and start to prefetch the next parameters.

        Args:
            whole: the values if they are still held; None to use prefetched ones or to gather now.
        """
        if self.orders is None:
            return self._fetched() if whole is None else whole
        order = self.orders.backward
        coming = order.arrived(self.key)
        whole = find(coming, self.local, self.dst) if whole is None else whole
        whole = self._fetched() if whole is None else whole
        order.go_on(self.key, _wanted_for)
        return whole

    def _fetched(self) -> Tensor:
        if self.coder is None:
            return run(self.local, self.src, self.dst)
        (whole,) = gather_each([self.local], [(self.src, self.dst)], [self.coder])
        return whole

    def dst_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the gathered values in ``dtype``."""
        at = my_coordinate(self.dst.placement)
        return math.prod(self.dst.local_shape(at)) * dtype.itemsize

    def forget(self) -> None:
        """Drop the values that backward kept, when it ended without taking all saved views."""
        self.whole, self.taken = None, 0


def _wanted_for(key: Any) -> list[Any]:
    """Return the shard, specs and codecs of one parameter, for its prefetch in backward.

    They are read from the module and not from saved graphs, which may be alive on some ranks only.

    Args:
        key: (the ``GatheredParameters`` that gather it, its position among them).
    """
    gathered, position = key
    return gathered.parts()[position : position + 1]


def modified(shape: Any, found: int, saved: int) -> RuntimeError:
    """Return torch's error for a saved tensor that was written to in place before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} is at version {found}; expected version "
        f"{saved} instead."
    )


def storage_of(x: Tensor) -> int:
    """Return an identifier of the storage of ``x``, valid while a tensor with it is alive."""
    with HookOff():
        held = parts_of(x)[-1] if is_sparse(x) else x
        return held.untyped_storage()._cdata


class _Thread(threading.local):
    def __init__(self) -> None:
        # Storage of gathered values -> their aliases made by `.data`, which have version counters
        # of their own.
        self.aliases: dict[int, list[Any]] = {}
        self.kept: dict[int, weakref.WeakSet[Gathering]] = {}
        self.opened = -1  # the last backward (graph task) that has taken gathered values


_thread = _Thread()


def _watch(alias: Any) -> None:
    # Called for each `x.data`, whose version counter does not count for `x`.
    if _thread.aliases:
        found = _thread.aliases.get(storage_of(plain(alias)))
        if found is not None:
            found.append(alias)


Tracer(on_data=_watch).always()


# -- the end of backward ---------------------------------------------------------------------------


def _opens_backward() -> bool:
    """Return whether this is the first time that the running backward takes gathered values."""
    task = torch._C._current_graph_task_id()
    before, _thread.opened = _thread.opened, task
    return task not in (-1, before)


def _let_go_after_backward(each: Gathering) -> bool:
    """Drop the values of ``each`` when this backward ends; return False outside of a backward.

    They may be dropped earlier, with the last view. A backward that stops at some inputs does not
    take all views.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return False
    if task not in _thread.kept:
        _thread.kept[task] = weakref.WeakSet()
        Variable._execution_engine.queue_callback(lambda: _forget(task))  # type: ignore[attr-defined]
    _thread.kept[task].add(each)
    return True


def _forget(task: int) -> None:
    for each in list(_thread.kept.pop(task, ())):
        each.forget()
