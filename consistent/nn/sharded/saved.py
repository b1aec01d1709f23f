"""Saved-tensor hooks that save views of gathered parameters without their values.

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

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...dispatch.plans.shards import HookOff, attach, is_global
from ...movement.sparse_parts import is_sparse
from ...spec import TensorSpec
from .gathering import Gathering, modified

_autograd: Any = getattr(torch._C, "_autograd")  # noqa: B009  (not in torch's stubs)

# Autograd nodes of ops that return a view of the whole storage.
_VIEWS = frozenset(f"{name}Backward0" for name in ("T", "Transpose", "Permute", "View", "Alias"))

_Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]


class _View(NamedTuple):
    """Saved tensor that is a view of a gathered parameter, or of its copy in ``dtype``.

    ``spec`` is the spec of a view that was a global tensor, otherwise None.
    """

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
    """Any other saved tensor, with its version.

    Torch does not check the version of saved tensors if hooks are in use, so it is checked here.
    """

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
    """Pair of saved-tensor hooks, in use from ``enter`` to ``leave``, with the gatherings it knows.

    Args:
        below: the pair of hooks that was innermost before; None if there was none.
    """

    def __init__(self, below: _Hooks | None) -> None:
        self.below = below
        self.depth = 0
        self.known: dict[int, Gathering] = {}  # by the storage of the gathered values
        # (node, output number) of the gathered values in the graph -> (gathering, gathered values,
        # their version).
        self.made: dict[tuple[Any, int], tuple[Gathering, Tensor, int]] = {}

    def add(self, whole: Tensor, source: Gathering) -> None:
        """Save views of the gathered values ``whole`` by ``source`` from now on."""
        with HookOff():
            if not whole.numel() or whole.is_meta or is_sparse(whole):
                return
            self.known[whole.untyped_storage()._cdata] = source
            if whole.grad_fn is not None:
                self.made[whole.grad_fn, whole.output_nr] = source, whole, whole._version

    def drop(self, gathered: Sequence[Gathering]) -> None:
        """Forget ``gathered``, whose storage may be reused by other tensors."""
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
        """Return the gathering whose values ``x`` is a copy of in another dtype, or a view of such.

        Returns None if ``x`` is no such copy.
        """
        node = x.grad_fn
        while node is not None and node.name() in _VIEWS:
            node = node.next_functions[0][0]
        if node is None or node.name() != "ToCopyBackward0" or x._version or _is_lazy(x):
            return None
        source, whole, writes = self.made.get(node.next_functions[0], (None, x, 0))
        if source is None or x.untyped_storage().nbytes() != source.dst_bytes(x.dtype):
            return None
        if whole._version != writes:
            return None  # forward has written to them since, so the copy may have older values
        source.oldest = writes if source.oldest is None else source.oldest
        return source

    def unpack(self, kept: Any) -> Tensor:
        if kept.__class__ is _View or kept.__class__ is _Alias:
            return kept.taken()
        assert self.below is not None
        return self.below[1](kept)


def innermost() -> _Hooks | None:
    """Return the innermost saved-tensor hooks in use; None if there are none."""
    return _autograd._top_saved_tensors_default_hooks(False)


def others_in_use() -> bool:
    """Return whether saved-tensor hooks other than those of this file are in use."""
    top = innermost()
    hooks = None if top is None else getattr(top[0], "__self__", None)
    return top is not None and not (isinstance(hooks, SavedShards) and hooks.below is None)


def enter() -> SavedShards:
    """Return this file's hooks on top of torch's stack, and push them if they are not there."""
    top = innermost()
    found = None if top is None else getattr(top[0], "__self__", None)
    if not isinstance(found, SavedShards):
        found = SavedShards(top)
        _autograd._push_saved_tensors_default_hooks(found.pack, found.unpack)
    found.depth += 1
    return found


def leave(hooks: SavedShards, gathered: Sequence[Gathering]) -> None:
    """Undo ``enter``, and forget the gatherings ``gathered``, which forward no longer sees."""
    hooks.drop(gathered)
    hooks.depth -= 1
    if not hooks.depth:
        _autograd._pop_saved_tensors_default_hooks()


def _is_lazy(x: Tensor) -> bool:
    # Views by conj() or as negatives: their values differ from those in the storage.
    return x.is_conj() or x.is_neg()
