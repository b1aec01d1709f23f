"""Gathered parameters in forward: their views that autograd saves, and writes to them.

Saved-tensor hooks save views without their values:

```
forward    shard -gather-> whole   an op saves a view of it: kept as (shard, sizes, strides, offset)
backward   shard -gather-> whole   the view is made again; the last view to be taken frees the whole
```

A copy of the whole parameter in another dtype, as autocast makes it, is saved in the same way, and
cast again in backward. Such a copy is recognized by its graph. The copy of a frozen parameter has
no graph, so it is saved with its values.

Torch calls only the innermost pair of hooks for saved tensors. Tensors that are not views of a
gathered parameter are therefore passed on to the hooks below, such as those of a checkpoint around
the module.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.plans.shards import HookOff, attach, is_global, plain
from ...movement.run import run
from ...movement.sparse_parts import is_sparse, tensors_of_sparse
from ...movement.world import my_coordinate
from ...spec import TensorSpec
from ...spec.tracer import Tracer
from .again import GatheredAgain, modified_error
from .order import GatherUnit, ToGather

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in torch's stubs)

# Autograd nodes of ops that return a view of the whole storage.
_VIEW_NODES = frozenset(
    f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Alias")
)

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class Gathering(GatheredAgain):
    """One parameter that is gathered in one call of a forward.

    After forward, ``GatheredAgain``, its base, gathers it again for backward.

    Args:
        item: the parameter, with its spec in forward and its codecs.
        seen: the gathered values, a global tensor that forward sees as the parameter.
        unit: the parameters with which it is gathered.
        position: its position among them.
    """

    __slots__ = ("param", "seen", "writes", "storage", "aliases", "saved_version")

    def __init__(self, item: ToGather, seen: Any, unit: GatherUnit, position: int) -> None:
        self.param: Any = item.param  # None after release, like `seen`
        self.seen: Any = seen
        self.src, self.dst, self.coder = item.param._spec, item.dst, item.coder
        self.orders, self.key = unit.orders, (unit, position)
        with HookOff():
            self.local = Tensor.detach(item.param)
            self.whole = Tensor.detach(seen) if position in unit.opens_backward else None
            self.storage = _storage_id(seen)
        self.version, self.writes = self.local._version, seen._version
        self.views = self.taken_views = 0
        # Version of the gathered values at the first saved view.
        self.saved_version: int | None = None
        self.aliases: list[Any] = []
        _thread.aliases[self.storage] = self.aliases

    def release(self) -> None:
        """Drop the gathered values, after copying in-place writes of forward to the parameter.

        Each rank copies its own part, so nothing is sent.
        """
        param, seen = self.param, self.seen
        self.param = self.seen = None
        if seen._version == self.writes and not any(alias._version for alias in self.aliases):
            return
        with torch.no_grad(), HookOff():
            own_part = run(plain(seen).detach(), seen._spec, param._spec)
            plain(param).detach().copy_(own_part)
        # If no write came after a saved view, backward may gather the new values without an error.
        if self.saved_version is None or self.saved_version == seen._version:
            self.version = self.local._version

    def dst_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the gathered values in ``dtype``."""
        at = my_coordinate(self.dst.placement)
        return math.prod(self.dst.local_shape(at)) * dtype.itemsize


# -- writes ----------------------------------------------------------------------------------------


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # Storage of gathered values -> their aliases made by `.data`, which have version counters
        # of their own.
        self.aliases: dict[int, list[Any]] = {}


_thread = _ThreadState()


def _track_alias(alias: Any) -> None:
    """Note an alias of gathered values that a program has made by ``x.data``."""
    # Called for each `x.data`, since a write to it does not raise the version counter of `x`.
    if _thread.aliases:
        aliases = _thread.aliases.get(_storage_id(plain(alias)))
        if aliases is not None:
            aliases.append(alias)


Tracer(on_data=_track_alias).install()


def _storage_id(x: Tensor) -> int:
    """Return an identifier of the storage of ``x``, valid as long as a tensor with it is alive."""
    with HookOff():
        values = tensors_of_sparse(x)[-1] if is_sparse(x) else x
        return values.untyped_storage()._cdata


def release_all(gathered: Iterable[Gathering]) -> None:
    """Drop the values of all of ``gathered``, after copying forward's writes to the parameters.

    New aliases of the values are no longer tracked, since other tensors may reuse their storage.
    """
    for gathering in gathered:
        _thread.aliases.pop(gathering.storage, None)
    for gathering in gathered:
        gathering.release()


# -- saved views -----------------------------------------------------------------------------------


class _SavedView(NamedTuple):
    """What autograd saves for a view of gathered values: how to make the view again.

    The view may also be one of a copy of the values in ``dtype``, as autocast makes it.

    Attributes:
        source: the gathered parameter.
        size, stride, offset: of the view, in the values' storage.
        dtype: the dtype of the view.
        spec: its spec if the view was a global tensor; None if plain.
    """

    source: Gathering
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    spec: TensorSpec | None

    def unpack(self) -> Tensor:
        """Gather the values again, and return the view of them."""
        with HookOff():
            whole = self.source.gather().to(self.dtype)
            view = whole.as_strided(self.size, self.stride, self.offset)
            return view if self.spec is None else attach(view, self.spec)


class _SavedTensor(NamedTuple):
    """What autograd saves for any other tensor: the tensor itself, with its version.

    Torch does not check the version of saved tensors if hooks are in use, so it is checked here.
    """

    value: Tensor
    version: int
    spec: TensorSpec | None

    def unpack(self) -> Tensor:
        """Return the tensor; raise as torch does if it was written to since."""
        value = self.value
        if value._version != self.version:
            raise modified_error(value.shape, value._version, self.version)
        if self.spec is None:
            return value
        with HookOff():
            return attach(value.detach(), self.spec)


class SavedShards:
    """Pair of saved-tensor hooks (``pack``, ``unpack``) by which autograd saves no gathered values.

    In use from ``enter_hooks`` to ``leave_hooks``. Views of the gathered values that it knows
    (``add``) are saved as ``_SavedView``, without values.

    Args:
        below: the pair of hooks that was innermost before; None if there was none.
    """

    def __init__(self, below: _Hooks | None) -> None:
        self.below = below
        self.depth = 0
        self.by_storage: dict[int, Gathering] = {}  # by the storage of the gathered values
        # (node, output number) of the gathered values in the graph -> (gathering, gathered values,
        # their version).
        self.by_graph_node: dict[tuple[Any, int], tuple[Gathering, Tensor, int]] = {}

    def add(self, gathered: Iterable[Gathering]) -> None:
        """Register gathered values, so that the hooks save views of them without their values."""
        with HookOff():
            for source in gathered:
                whole = source.seen
                if not source.dst.numel or whole.is_meta or is_sparse(whole):
                    continue
                self.by_storage[source.storage] = source
                if whole.grad_fn is not None:
                    self.by_graph_node[whole.grad_fn, whole.output_nr] = (
                        source,
                        whole,
                        whole._version,
                    )

    def drop(self, gathered: Sequence[Gathering]) -> None:
        """Forget the values of ``gathered``, since other tensors may reuse their storage."""
        for gathering in gathered:
            source = self.by_storage.pop(gathering.storage, None)
            for key in [key for key, (made, *_) in self.by_graph_node.items() if made is source]:
                del self.by_graph_node[key]

    def pack(self, x: Tensor) -> Any:
        """Return what autograd saves for the tensor ``x`` (the first of the hooks)."""
        with HookOff():
            spec: TensorSpec | None = x._spec if is_global(x) else None  # type: ignore[attr-defined]
            if x.layout is torch.strided and not x.is_meta:
                source = self.by_storage.get(x.untyped_storage()._cdata)
                if source is not None and x.dtype is source.dst.dtype and not _is_lazy(x):
                    source.saved_version = (
                        x._version if source.saved_version is None else source.saved_version
                    )
                else:
                    source = self._source_of_cast(x)
                if source is not None:
                    source.views += 1
                    size, stride = tuple(x.size()), x.stride()
                    return _SavedView(source, size, stride, int(x.storage_offset()), x.dtype, spec)
            if self.below is None:
                return _SavedTensor(x.detach(), x._version, spec)
        return self.below[0](x)

    def _source_of_cast(self, x: Tensor) -> Gathering | None:
        """Return the gathered parameter of which ``x`` is a copy in another dtype, as by autocast.

        ``x`` may also be a view of such a copy. None if it is neither.
        """
        node = x.grad_fn
        while node is not None and node.name() in _VIEW_NODES:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0" or x._version or _is_lazy(x):
            return None
        source, whole, writes = self.by_graph_node.get(node.next_functions[0], (None, x, 0))
        if source is None or x.untyped_storage().nbytes() != source.dst_bytes(x.dtype):
            return None
        if whole._version != writes:
            return None  # forward has written to them since, so the copy may have older values
        source.saved_version = writes if source.saved_version is None else source.saved_version
        return source

    def unpack(self, packed: Any) -> Tensor:
        """Return the tensor for which ``pack`` returned ``packed`` (the second of the hooks)."""
        if packed.__class__ is _SavedView or packed.__class__ is _SavedTensor:
            return packed.unpack()
        assert self.below is not None
        return self.below[1](packed)


# () -> the innermost saved-tensor hooks in use; None if there are none.
innermost_hooks: Callable[[], _Hooks | None] = partial(
    _autograd._top_saved_tensors_default_hooks, False
)


def other_hooks_in_use() -> bool:
    """Return whether saved-tensor hooks of other code are in use, such as those of a checkpoint."""
    top = innermost_hooks()
    hooks = None if top is None else getattr(top[0], "__self__", None)
    return top is not None and not (isinstance(hooks, SavedShards) and hooks.below is None)


def enter_hooks(gathered: Sequence[Gathering]) -> SavedShards:
    """Use ``SavedShards`` hooks for what forward does next, and return them.

    Those on top of torch's stack are used again; otherwise new ones are pushed.

    Args:
        gathered: the gathered parameters, of which autograd is to save views without values.
    """
    top = innermost_hooks()
    hooks = None if top is None else getattr(top[0], "__self__", None)
    if not isinstance(hooks, SavedShards):
        hooks = SavedShards(top)
        _autograd._push_saved_tensors_default_hooks(hooks.pack, hooks.unpack)
    hooks.depth += 1
    hooks.add(gathered)
    return hooks


def leave_hooks(hooks: SavedShards, gathered: Sequence[Gathering]) -> None:
    """Undo ``enter_hooks`` for the parameters ``gathered``; the last one pops the hooks."""
    hooks.drop(gathered)
    hooks.depth -= 1
    if not hooks.depth:
        _autograd._pop_saved_tensors_default_hooks()


def _is_lazy(x: Tensor) -> bool:
    # Views by conj() or as negatives: their values differ from those in the storage.
    return x.is_conj() or x.is_neg()
