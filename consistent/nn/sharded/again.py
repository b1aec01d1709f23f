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
from .order import GatherOrders, take_prefetched, wanted_in_backward


class GatheredAgain:
    """Parameter that backward gathers again, since autograd has saved views of its values.

    A saved view refers to this object, which has all that a second gather needs: the shard, its
    version, and the number of saved views. Forward makes one for each parameter that it gathers, as
    a ``Gathering`` (``saved.py``), a subclass.
    """

    __slots__ = (
        "local", "src", "dst", "coder", "orders", "key", "version",
        "views", "taken_views", "whole",
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
    taken_views: int  # views that backward has taken
    whole: Tensor | None  # the gathered values, while backward keeps them

    def gather(self) -> Tensor:
        """Return the gathered values for backward, which unpacks a saved view of them.

        With the last saved view, this object drops the values, so that the caller has the only
        reference.

        Raises:
            RuntimeError: the parameter was written to since forward.
        """
        if self.local._version != self.version:
            raise modified_error(self.src.shape, self.local._version, self.version)
        whole = self.whole
        opens = _opens_backward()
        if opens:
            unit, position = self.key
            unit.opens_backward.add(position)
        if whole is None or opens:
            whole = self._gather_again(whole)
        self.taken_views += 1
        # modulo: a retained graph may run backward again
        is_last = self.taken_views % self.views == 0
        self.whole = whole if not is_last and _drop_after_backward(self) else None
        return whole

    def _gather_again(self, whole: Tensor | None) -> Tensor:
        """Return the gathered values for backward, and start to prefetch those that follow.

        Args:
            whole: the values, if they are still held. With None, prefetched ones are used, or else
                they are gathered at once.
        """
        if self.orders is None:
            return self._gather_now() if whole is None else whole
        order = self.orders.backward
        prefetch = order.record_gather(self.key)
        whole = take_prefetched(prefetch, self.local, self.dst) if whole is None else whole
        whole = self._gather_now() if whole is None else whole
        order.prefetch_next(self.key, wanted_in_backward)
        return whole

    def _gather_now(self) -> Tensor:
        """Gather the values at once, by the codec if the parameter has one."""
        if self.coder is None:
            return run(self.local, self.src, self.dst)
        (whole,) = gather_each([self.local], [(self.src, self.dst)], [self.coder])
        return whole

    def drop_values(self) -> None:
        """Drop the values that backward kept, as it ends without having taken all saved views."""
        self.whole, self.taken_views = None, 0


def modified_error(shape: Any, found: int, saved: int) -> RuntimeError:
    """Return torch's error for a saved tensor that was written to in place before backward."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace "
        f"operation: a tensor of shape {list(shape)} is at version {found}; expected version "
        f"{saved} instead."
    )


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # Id of a running backward (autograd graph task) -> objects that hold gathered values, to
        # be dropped when it ends.
        self.gathered_by_task: dict[int, weakref.WeakSet[GatheredAgain]] = {}
        self.last_task = -1  # the last backward (graph task) that has taken gathered values


_thread = _ThreadState()


# -- the end of backward ---------------------------------------------------------------------------


def _opens_backward() -> bool:
    """Return whether the running backward takes gathered values for the first time."""
    task = torch._C._current_graph_task_id()
    previous, _thread.last_task = _thread.last_task, task
    return task not in (-1, previous)


def _drop_after_backward(gathered: GatheredAgain) -> bool:
    """Drop the values of ``gathered`` when this backward ends; return False outside backward.

    ``gather`` drops them earlier, with the last saved view. But a backward to some inputs only, as
    by ``torch.autograd.grad``, may not unpack all saved views.
    """
    task = torch._C._current_graph_task_id()
    if task == -1:
        return False
    if task not in _thread.gathered_by_task:
        _thread.gathered_by_task[task] = weakref.WeakSet()
        Variable._execution_engine.queue_callback(lambda: _drop_values_of(task))  # type: ignore[attr-defined]
    _thread.gathered_by_task[task].add(gathered)
    return True


def _drop_values_of(task: int) -> None:
    """Drop the gathered values that the backward with id ``task`` kept; called at its end."""
    for gathered in list(_thread.gathered_by_task.pop(task, ())):
        gathered.drop_values()
