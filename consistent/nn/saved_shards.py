"""What autograd saves of gathered parameters: how it lies in them, not their values.

```
forward    shard -gather-> whole   an op saves a view of it: kept as (shard, sizes, strides, offset)
backward   shard -gather-> whole   the view is taken again; the last one that is taken lets it go
```

A copy of the whole parameter in another dtype, as autocast makes it, is kept in the same way, and
cast again. That it is one is read from the graph, so that of a frozen parameter is kept itself.

Torch calls only the innermost pair of hooks for saved tensors, so tensors that are not views of a
gathered parameter are passed on to the hooks below: those of a checkpoint around the module, say.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ..dispatch.plans.shards import HookOff, attach, is_global
from ..movement.coded import gather_each
from ..movement.coders import Coder
from ..movement.run import run
from ..movement.sparse_parts import is_sparse, parts_of
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from .gather_ahead import Orders, find

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in torch's stubs)

# Nodes of views, which leave each number where it is in memory.
_VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Alias"))

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class GatheredOnce:
    """A parameter as one run of forward has gathered it: gathered again where backward needs it."""

    __slots__ = (
        "local", "src", "dst", "coder", "version",
        "views", "oldest", "taken", "whole", "orders", "key",
        "__weakref__",
    )  # fmt: skip

    def __init__(
        self, param: Any, dst: TensorSpec, coder: Coder | None, orders: Orders | None, key: Any
    ) -> None:
        self.coder, self.orders, self.key = coder, orders, key
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
        opens = _opens_backward()
        if opens:
            unit, position = self.key
            unit.opens_backward.add(position)
        if whole is None or opens:
            whole = self._gather(whole)
        self.taken += 1
        last = self.taken % self.views == 0
        self.whole = whole if not last and _let_go_after_backward(self) else None
        return whole

    def _gather(self, whole: Tensor | None) -> Tensor:
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

    def wrote(self, writes: int) -> None:
        """Forward has written into the gathered values, ``writes`` times as torch counts, and then
        these were written into the shard."""
        if self.oldest is None or self.oldest == writes:
            self.version = self.local._version

    def forget(self) -> None:
        """Backward has ended, and needed less than was saved."""
        self.whole, self.taken = None, 0


def _wanted_for(key: Any) -> list[Any]:
    """Asked of the parameter: whether a graph that saved it lives is a rank's own affair."""
    unit, position = key
    return unit.parts()[position : position + 1]


class _View(NamedTuple):
    """A saved tensor that is a view of a gathered parameter, or of a copy of it in ``dtype``;
    ``spec`` if it was seen as global."""

    source: GatheredOnce
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    spec: TensorSpec | None

    def taken(self) -> Tensor:
        with HookOff():
            whole = self.source.take().to(self.dtype)
            view = whole.as_strided(self.size, self.stride, self.offset)
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
        with HookOff():
            return attach(value.detach(), self.spec)


class SavedShards:
    """A pair of hooks for saved tensors, from ``enter`` to ``leave``, and the gathered parameters
    that it knows."""

    def __init__(self, below: _Hooks | None) -> None:
        self.below = below
        self.depth = 0
        self.known: dict[int, GatheredOnce] = {}  # by the storage of the gathered values
        # By the graph's node and its output; with the gathered values, and the writes into them.
        self.made: dict[tuple[Any, int], tuple[GatheredOnce, Tensor, int]] = {}

    def add(self, whole: Tensor, source: GatheredOnce) -> None:
        """From now on, save views of ``whole`` by ``source``."""
        with HookOff():
            if not whole.numel() or whole.is_meta or is_sparse(whole):
                return
            self.known[whole.untyped_storage()._cdata] = source
            if whole.grad_fn is not None:
                self.made[whole.grad_fn, whole.output_nr] = source, whole, whole._version

    def drop(self, storage: int) -> None:
        """This memory may become that of another tensor."""
        source = self.known.pop(storage, None)
        for key in [key for key, (each, *_) in self.made.items() if each is source]:
            del self.made[key]

    def pack(self, x: Tensor) -> Any:
        with HookOff():
            spec: TensorSpec | None = x._spec if is_global(x) else None  # type: ignore[attr-defined]
            if x.layout is torch.strided and not x.is_meta:
                source = self.known.get(x.untyped_storage()._cdata)
                if source is not None and x.dtype is source.dst.dtype and not _is_lazy(x):
                    source.oldest = x._version if source.oldest is None else source.oldest
                else:
                    source = self._cast(x)
                if source is not None:
                    source.views += 1
                    size, stride = tuple(x.size()), x.stride()
                    return _View(source, size, stride, int(x.storage_offset()), x.dtype, spec)
            if self.below is None:
                return _Alias(x.detach(), x._version, spec)
        return self.below[0](x)

    def _cast(self, x: Tensor) -> GatheredOnce | None:
        """The gathered parameter of which ``x`` is a copy in another dtype, or a view of one."""
        node = x.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0" or x._version or _is_lazy(x):
            return None
        source, whole, writes = self.made.get(node.next_functions[0], (None, x, 0))
        if source is None or x.untyped_storage().nbytes() != source.dst_bytes(x.dtype):
            return None
        if whole._version != writes:
            return None  # forward has written into them: the copy may be older
        source.oldest = writes if source.oldest is None else source.oldest
        return source

    def unpack(self, kept: Any) -> Tensor:
        if kept.__class__ is _View or kept.__class__ is _Alias:
            return kept.taken()
        assert self.below is not None
        return self.below[1](kept)


def innermost() -> _Hooks | None:
    """The hooks for saved tensors that are in use."""
    return _autograd._top_saved_tensors_default_hooks(False)


def others_in_use() -> bool:
    """Whether hooks for saved tensors are in use that are not of this file."""
    top = innermost()
    hooks = None if top is None else getattr(top[0], "__self__", None)
    return top is not None and not (isinstance(hooks, SavedShards) and hooks.below is None)


def enter() -> SavedShards:
    """The innermost hooks, which are to know about parameters that are gathered from now on."""
    top = innermost()
    found = None if top is None else getattr(top[0], "__self__", None)
    if not isinstance(found, SavedShards):
        found = SavedShards(top)
        _autograd._push_saved_tensors_default_hooks(found.pack, found.unpack)
    found.depth += 1
    return found


def leave(hooks: SavedShards) -> None:
    """The mirror image of ``enter``."""
    hooks.depth -= 1
    if not hooks.depth:
        _autograd._pop_saved_tensors_default_hooks()


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


def _is_lazy(x: Tensor) -> bool:
    return x.is_conj() or x.is_neg()


# -- the end of backward ---------------------------------------------------------------------------


class _Thread(threading.local):
    def __init__(self) -> None:
        self.kept: dict[int, weakref.WeakSet[GatheredOnce]] = {}
        self.opened = -1  # the last backward that has taken something


_thread = _Thread()


def _opens_backward() -> bool:
    """Whether this is the first time that the backward which runs takes something."""
    task = torch._C._current_graph_task_id()
    before, _thread.opened = _thread.opened, task
    return task not in (-1, before)


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
