"""Ops that return a view on one device, and the strides that tensors would have on one device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...rules.layout.view import dim_groups
from ..plans.shards import is_global, plain

VIEWS = frozenset(
    """getitem select narrow slice view reshape view_as reshape_as transpose t permute movedim
    moveaxis swapaxes swapdims adjoint squeeze unsqueeze atleast_1d atleast_2d atleast_3d expand
    expand_as broadcast_to split chunk split_with_sizes tensor_split hsplit vsplit dsplit
    unsafe_chunk unsafe_split unsafe_split_with_sizes unbind diagonal linalg_diagonal flatten ravel
    unflatten unfold real imag detach""".split()
)
# If these ops join dims, strides decide whether torch returns a view or a copy. The strides are
# examined only when the program could notice: when the source or the result was written.
_STRIDE_DEPENDENT = frozenset(("reshape", "reshape_as", "flatten", "ravel"))


def is_view(plan: Any) -> bool:
    """Return whether the result of the op of ``plan`` shares storage with its input on one device.

    For ops such as ``reshape`` the strides may decide otherwise, see ``strides_decide``.
    """
    if plan.name != "getitem":
        return plan.name in VIEWS
    # Indexing with tensors or lists of numbers makes a copy in torch, too.
    index = plan.call.args[1] if plan.call.args[1].__class__ is tuple else (plan.call.args[1],)
    return len(plan.call.operands) == 1 and not any(isinstance(part, list | bool) for part in index)


def strides_decide(plan: Any, source: Any, out: Any) -> bool:
    """Return whether torch would return a view or a copy depending on the strides of ``source``.

    True for ``reshape`` and the like where dims are joined. ``plan`` is that of the call, ``out``
    its result.
    """
    return plan.name in _STRIDE_DEPENDENT and _joins_dims(source._spec.shape, out._spec.shape)


def _joins_dims(source: Sequence[int], target: Sequence[int]) -> bool:
    """Return whether a reshape from ``source`` to ``target`` merges several dims into one.

    If it does not, torch returns a view, whatever the strides are.
    """
    return any(sum(source[d] != 1 for d in dims) > 1 for dims, _ in dim_groups(source, target))


def on_one_device(x: Any) -> torch.Tensor:
    """Return a meta tensor with the shape and strides that ``x`` would have on one device.

    The order of its dims by stride, and the gaps between items, are those of the shard.
    """
    if not is_global(x):
        return x.to("meta")
    shard, sizes = plain(x), tuple(x._spec.shape)
    strides, whole, local = [0] * len(sizes), 1, 1
    for d in sorted(range(len(sizes)), key=lambda d: (shard.stride(d), -d)):
        if shard.stride(d) == 0:  # expanded
            continue
        gap = max(1, shard.stride(d) // local)  # above 1 if items are spread out, as in x[:, ::2]
        strides[d] = whole = whole * gap
        whole, local = whole * max(1, sizes[d]), shard.stride(d) * max(1, shard.shape[d])
    return torch.empty_strided(sizes, strides, dtype=x._spec.dtype, device="meta")
