"""One gathering of one parameter: by a run of forward, and again where backward needs it."""

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
    """A parameter as one run of forward gathers it.

    While forward runs, ``seen`` is what it sees. Afterwards autograd has what is needed to gather
    once more: the shard, its writes, and how many views of the gathered values it has saved.

    Args:
        param: the parameter, a global tensor.
        dst: the spec that forward sees it in.
        coder: by what it is sent in fewer bytes, if it is.
        orders: in which it is prefetched, if it is.
        key: (the parameters that are gathered with it, its position among them).
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
        self.param: Any = param  # until it is released, as `seen` is
        self.coder, self.orders, self.key = coder, orders, key
        self.src: TensorSpec = param._spec
        self.dst = dst
        with HookOff():
            self.local = Tensor.detach(param)  # shares memory and the count of writes
        self.version = self.local._version
        self.seen: Any = None
        self.views = self.taken = 0  # saved by autograd, and taken in backward so far
        self.oldest: int | None = None  # writes into the gathered values before the first of them
        self.whole: Tensor | None = None  # the values, where backward keeps them

    def show(self, seen: Any) -> None:
        """Forward sees ``seen`` from now on, a global tensor; what it writes there is noted."""
        self.seen, self.writes = seen, seen._version
        self.storage, self.aliases = storage_of(plain(seen)), []
        _thread.aliases[self.storage] = self.aliases

    def hide(self) -> None:
        """Forward sees it no more; another tensor may get this memory."""
        _thread.aliases.pop(self.storage, None)

    def release(self) -> None:
        """Write what forward has written into the gathered values into the parameter, of which each
        rank keeps its part, and let the values go. Nothing is sent."""
        param, seen = self.param, self.seen
        self.param = self.seen = None
        if seen._version == self.writes and not any(alias._version for alias in self.aliases):
            return
        with torch.no_grad(), HookOff():
            mine = run(plain(seen).detach(), seen._spec, param._spec)
            plain(param).detach().copy_(mine)
        if self.oldest is None or self.oldest == seen._version:
            self.version = self.local._version

    def take(self) -> Tensor:
        """The gathered values, for backward. The caller of the last view of a backward gets the
        only reference to them."""
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
        last = self.taken % self.views == 0
        self.whole = whole if not last and _let_go_after_backward(self) else None
        return whole

    def _gather_again(self, whole: Tensor | None) -> Tensor:
        """``whole`` or, if it is None, the values that come; sends for the next ones."""
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
        """Bytes of the gathered values in ``dtype``."""
        at = my_coordinate(self.dst.placement)
        return math.prod(self.dst.local_shape(at)) * dtype.itemsize

    def forget(self) -> None:
        """Backward has ended, and needed less than was saved."""
        self.whole, self.taken = None, 0


def _wanted_for(key: Any) -> list[Any]:
    """Asked of the parameter: whether a graph that saved it lives is a rank's own affair."""
    gathered, position = key
    return gathered.parts()[position : position + 1]


def modified(shape: Any, found: int, saved: int) -> RuntimeError:
    """Torch's own words for a saved tensor that was written to before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} is at version {found}; expected version "
        f"{saved} instead."
    )


def storage_of(x: Tensor) -> int:
    """What tensors that share memory have in common, while one of them is alive."""
    with HookOff():
        held = parts_of(x)[-1] if is_sparse(x) else x
        return held.untyped_storage()._cdata


class _Thread(threading.local):
    def __init__(self) -> None:
        # The aliases that `.data` made of gathered values, by their storage; each counts writes by
        # itself.
        self.aliases: dict[int, list[Any]] = {}
        self.kept: dict[int, weakref.WeakSet[Gathering]] = {}
        self.opened = -1  # the last backward that has taken something


_thread = _Thread()


def _watch(alias: Any) -> None:
    if _thread.aliases:
        found = _thread.aliases.get(storage_of(plain(alias)))
        if found is not None:
            found.append(alias)


Tracer(on_data=_watch).always()


# -- the end of backward ---------------------------------------------------------------------------


def _opens_backward() -> bool:
    """Whether this is the first time that the backward which runs takes something."""
    task = torch._C._current_graph_task_id()
    before, _thread.opened = _thread.opened, task
    return task not in (-1, before)


def _let_go_after_backward(each: Gathering) -> bool:
    """Let ``each`` go when this backward ends, if not earlier: a backward that stops at some inputs
    does not take all views. Returns False outside of a backward."""
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
