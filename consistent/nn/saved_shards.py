"""What autograd saves of gathered parameters: how it lies in them, not their values.

```
forward    shard -gather-> whole   an op saves a view of it: kept as (shard, sizes, strides, offset)
backward   shard -gather-> whole   the view is taken again; the last one that is taken lets it go
```

Torch calls only the innermost pair of hooks for saved tensors, so tensors that are no views of a
gathered parameter are passed on to the hooks below: those of a checkpoint around the module, say.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ..dispatch.plans.shards import HookOff, attach, is_global
from ..movement.run import run
from ..spec import TensorSpec
from .gather_ahead import Orders, find

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class GatheredOnce:
    """A parameter as one run of forward has gathered it: gathered again where backward needs it."""

    __slots__ = (
        "local", "src", "dst", "version", "views", "oldest", "taken", "whole", "orders", "key",
        "__weakref__",
    )  # fmt: skip

    def __init__(self, param: Any, dst: TensorSpec, orders: Orders | None, key: Any) -> None:
        self.orders, self.key = orders, key
        if orders is not None:
            orders.latest[key] = self
        self.src: TensorSpec = param._spec
        self.dst = dst
        with HookOff():
            self.local = Tensor.detach(param)  # shares memory and the count of writes
        self.version = self.local._version
        self.views = self.taken = 0  # saved by autograd, and taken in backward so far
        self.oldest: int | None = None  # writes into the gathered values before the first of them
        self.whole: Tensor | None = None

    def take(self) -> Tensor:
        """The gathered values. The caller of the last view of a backward gets the only reference to
        them."""
        if self.local._version != self.version:
            raise modified(self.src.shape, self.local._version, self.version)
        whole = self.whole
        if whole is None:
            whole = self._gather()
        self.taken += 1
        last = self.taken % self.views == 0
        self.whole = whole if not last and _let_go_after_backward(self) else None
        return whole

    def _gather(self) -> Tensor:
        if self.orders is None:
            return run(self.local, self.src, self.dst)
        order = self.orders.backward
        coming = order.arrived(self.key)
        whole = find(coming, self.local, self.dst)
        whole = run(self.local, self.src, self.dst) if whole is None else whole
        following = order.expected(self.key)
        source = None if following is None else self.orders.latest.get(following)
        if source is not None and source.views and source.whole is None:
            order.submit(self.key, following, [(source.local, source.src, source.dst)])
        return whole

    def wrote(self, writes: int) -> None:
        """Forward has written into the gathered values, ``writes`` times as torch counts, and then
        these were written into the shard."""
        if self.oldest is None or self.oldest == writes:
            self.version = self.local._version

    def forget(self) -> None:
        """Backward has ended, and needed less than was saved."""
        self.whole, self.taken = None, 0


class _View(NamedTuple):
    """A saved tensor that is a view of a gathered parameter; ``spec`` if it was seen as global."""

    source: GatheredOnce
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    spec: TensorSpec | None

    def taken(self) -> Tensor:
        with torch.no_grad(), HookOff():
            view = self.source.take().as_strided(self.size, self.stride, self.offset)
            return view if self.spec is None else attach(view, self.spec)


class _Alias(NamedTuple):
    """Any other saved tensor. Torch counts no writes where hooks are in use, so they are counted
    here."""

    value: Tensor
    version: int
    spec: TensorSpec | None

    def taken(self) -> Tensor:
        value = self.value
        if value._version != self.version:
            raise modified(value.shape, value._version, self.version)
        if self.spec is None:
            return value
        with torch.no_grad(), HookOff():
            return attach(value.detach(), self.spec)


class SavedShards:
    """A pair of hooks for saved tensors, from ``enter`` to ``leave``, and the gathered parameters
    that it knows."""

    def __init__(self, below: _Hooks | None) -> None:
        self.below = below
        self.depth = 0
        self.known: dict[int, GatheredOnce] = {}  # by the storage of the gathered values

    def add(self, whole: Tensor, source: GatheredOnce) -> None:
        """From now on, save views of ``whole`` by ``source``."""
        if whole.numel() and not whole.is_meta:
            self.known[storage_of(whole)] = source

    def drop(self, storage: int) -> None:
        """This memory may become that of another tensor."""
        self.known.pop(storage, None)

    def pack(self, x: Tensor) -> Any:
        with HookOff():
            spec: TensorSpec | None = x._spec if is_global(x) else None  # type: ignore[attr-defined]
            if x.layout is torch.strided and not x.is_meta:
                source = self.known.get(storage_of(x))
                if source is not None and x.dtype is source.dst.dtype and not _is_lazy(x):
                    source.views += 1
                    source.oldest = x._version if source.oldest is None else source.oldest
                    size, stride = tuple(x.size()), x.stride()
                    return _View(source, size, stride, x.storage_offset(), spec)
            if self.below is None:
                return _Alias(x.detach(), x._version, spec)
        return self.below[0](x)

    def unpack(self, kept: Any) -> Tensor:
        if kept.__class__ is _View or kept.__class__ is _Alias:
            return kept.taken()
        assert self.below is not None
        return self.below[1](kept)


def enter() -> SavedShards:
    """The innermost hooks, which are to know about parameters that are gathered from now on."""
    top = torch._C._autograd._top_saved_tensors_default_hooks(False)
    found = None if top is None else getattr(top[0], "__self__", None)
    if not isinstance(found, SavedShards):
        found = SavedShards(top)
        torch._C._autograd._push_saved_tensors_default_hooks(found.pack, found.unpack)
    found.depth += 1
    return found


def leave(hooks: SavedShards) -> None:
    """The mirror image of ``enter``."""
    hooks.depth -= 1
    if not hooks.depth:
        torch._C._autograd._pop_saved_tensors_default_hooks()


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
        return x.untyped_storage()._cdata


def _is_lazy(x: Tensor) -> bool:
    return x.is_conj() or x.is_neg()


# -- the end of backward ---------------------------------------------------------------------------


class _Thread(threading.local):
    def __init__(self) -> None:
        self.kept: dict[int, weakref.WeakSet[GatheredOnce]] = {}


_thread = _Thread()


def _let_go_after_backward(source: GatheredOnce) -> bool:
    """Let ``source`` go when this backward ends, if not earlier: a backward that stops at some
    inputs does not take all views. Returns False outside of a backward."""
    task = torch._C._current_graph_task_id()
    if task == -1:
        return False
    if task not in _thread.kept:
        _thread.kept[task] = weakref.WeakSet()
        Variable._execution_engine.queue_callback(lambda: _forget(task))  # type: ignore[attr-defined]
    _thread.kept[task].add(source)
    return True


def _forget(task: int) -> None:
    for source in list(_thread.kept.pop(task, ())):
        source.forget()
