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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.plans.shards import HookOff, attach, is_global
from ...movement.sparse_parts import is_sparse
from ...spec import TensorSpec
from .gathering import Gathering, modified

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in torch's stubs)

# Nodes of views, which leave each number where it is in memory.
_VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Alias"))

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _View(NamedTuple):
    """A saved tensor that is a view of a gathered parameter, or of a copy of it in ``dtype``;
    ``spec`` if it was seen as global."""

    source: Gathering
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
        self.known: dict[int, Gathering] = {}  # by the storage of the gathered values
        # By the graph's node and its output; with the gathered values, and the writes into them.
        self.made: dict[tuple[Any, int], tuple[Gathering, Tensor, int]] = {}

    def add(self, whole: Tensor, source: Gathering) -> None:
        """From now on, save views of ``whole`` by ``source``."""
        with HookOff():
            if not whole.numel() or whole.is_meta or is_sparse(whole):
                return
            self.known[whole.untyped_storage()._cdata] = source
            if whole.grad_fn is not None:
                self.made[whole.grad_fn, whole.output_nr] = source, whole, whole._version

    def drop(self, gathered: Sequence[Gathering]) -> None:
        """Their memory may become that of other tensors."""
        for each in gathered:
            source = self.known.pop(each.storage, None)
            for key in [key for key, (made, *_) in self.made.items() if made is source]:
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

    def _cast(self, x: Tensor) -> Gathering | None:
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


def leave(hooks: SavedShards, gathered: Sequence[Gathering]) -> None:
    """The mirror image of ``enter``, after which forward sees ``gathered`` no more."""
    hooks.drop(gathered)
    hooks.depth -= 1
    if not hooks.depth:
        _autograd._pop_saved_tensors_default_hooks()


def _is_lazy(x: Tensor) -> bool:
    return x.is_conj() or x.is_neg()
