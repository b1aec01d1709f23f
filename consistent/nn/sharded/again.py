"""Gather a parameter again when backward needs it."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable

from ...movement.coded import gather_each
from ...movement.coders import Coder
from ...movement.run import run
from ...spec import TensorSpec
from .order import GatherOrders, find, wanted_at


class GatheredAgain:
    """Parameter that backward gathers again, since autograd has saved views of its values.

    A saved view refers to this object, which has all that a second gather needs: the shard, its
    version, and the number of saved views. Forward makes one for each parameter that it gathers, as
    a ``Gathering`` (``saved.py``), a subclass.
    """

    __slots__ = (
        "local", "src", "dst", "coder", "orders", "key", "version",
        "views", "taken", "whole",
        "__weakref__",
    )  # fmt: skip

    local: Tensor  # the shard, which shares storage and version counter with the parameter
    src: TensorSpec
    dst: TensorSpec
    coder: Coder | None
    orders: GatherOrders | None
    key: Any  # (the `GatherUnit` that it belongs to, its position among those to gather)
    version: int  # of the shard, when it was gathered in forward
    views: int  # that autograd has saved
    taken: int  # views that backward has taken
    whole: Tensor | None  # the gathered values, while backward keeps them

    def take(self) -> Tensor:
        """Return the gathered values for backward, which unpacks a saved view of them.

        With the last saved view, this object drops the values, so that the caller has the only
        reference.

        Raises:
            RuntimeError: the parameter was written to since forward.
        """
        if self.local._version != self.version:
            raise modified(self.src.shape, self.local._version, self.version)
        whole = self.whole
        opens = _opens_backward()
        if opens:
            unit, position = self.key
            unit.opens_backward.add(position)
        if whole is None or opens:
            whole = self._gather_again(whole)
        self.taken += 1
        last = self.taken % self.views == 0  # modulo: a retained graph may run backward again
        self.whole = whole if not last and _let_go_after_backward(self) else None
        return whole

    def _gather_again(self, whole: Tensor | None) -> Tensor:
        """Return the gathered values for backward, and start to prefetch those that follow.

        Args:
            whole: the values, if they are still held. With None, prefetched ones are used, or else
                they are gathered at once.
        """
        if self.orders is None:
            return self._fetched() if whole is None else whole
        order = self.orders.backward
        coming = order.arrived(self.key)
        whole = find(coming, self.local, self.dst) if whole is None else whole
        whole = self._fetched() if whole is None else whole
        order.go_on(self.key, wanted_at)
        return whole

    def _fetched(self) -> Tensor:
        """Gather the values at once, by the codec if the parameter has one."""
        if self.coder is None:
            return run(self.local, self.src, self.dst)
        (whole,) = gather_each([self.local], [(self.src, self.dst)], [self.coder])
        return whole

    def forget(self) -> None:
        """Drop the values that backward kept, as it ends without having taken all saved views."""
        self.whole, self.taken = None, 0


def modified(shape: Any, found: int, saved: int) -> RuntimeError:
    """Return torch's error for a saved tensor that was written to in place before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} is at version {found}; expected version "
        f"{saved} instead."
    )


class _Thread(threading.local):
    def __init__(self) -> None:
        # Id of a running backward (autograd graph task) -> objects that hold gathered values, to
        # be dropped when it ends.
        self.kept: dict[int, weakref.WeakSet[GatheredAgain]] = {}
        self.opened = -1  # the last backward (graph task) that has taken gathered values


_thread = _Thread()


# -- the end of backward ---------------------------------------------------------------------------


def _opens_backward() -> bool:
    """Return whether the running backward takes gathered values for the first time."""
    task = torch._C._current_graph_task_id()
    before, _thread.opened = _thread.opened, task
    return task not in (-1, before)


def _let_go_after_backward(each: GatheredAgain) -> bool:
    """Drop the gathered values of ``each`` when this backward ends; return False outside backward.

    ``take`` drops them earlier, with the last saved view. But a backward to some inputs only, as by
    ``torch.autograd.grad``, may not unpack all saved views.
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
    """Drop the gathered values that the backward with id ``task`` kept; called at its end."""
    for each in list(_thread.kept.pop(task, ())):
        each.forget()
