"""Leaves that several ranks hold: how a new gradient is summed and added to ``.grad``.

Autograd computes this rank's addend. A hook in C++ (``csrc/bindings/dispatch/gradients/leaf.cpp``)
intercepts simple addends before torch adds them: they wait in a bucket (gradients that are reduced
in one message), and their sum is added instead. All other addends are passed to
``take_gradient``, which returns to torch a gradient in the layout of the present ``.grad``.

``.grad`` is a correct global tensor at every moment, and so is every alias of it. If its layout has
to change (only inside and after ``no_sync()``), the object gets new memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from mirrored.transports.base.unseen import hidden_from_modes

from ..dispatch import _C
from ..dispatch.planning.planning import common_placement
from ..dispatch.plans.gradients import set_raw_grad, settled_spec, summed_axes
from ..dispatch.plans.shards import HookOff, attach, compare_and_adopt, plain, rebox, replace_shard
from ..movement.boxed import box
from ..movement.run import run
from ..movement.several import overlap_flags
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from . import buckets, scattering
from .shown import forget_record, hide

# More bytes than any gradient has. Given to C++ as the size of a leaf, it makes C++ pass all
# gradients of the leaf to ``take_gradient``.
_TAKE_ALL_BYTES = 1 << 62


def watch_leaf(leaf: Any) -> None:
    """Decide how gradients of ``leaf`` are added to its ``.grad``, and set up its C++ hook.

    It is called for each new leaf, and again if the layout of its gradient changes. A leaf for
    which torch's own addition is correct, since nothing is summed over ranks, gets no hook.
    """
    spec: TensorSpec = leaf._spec
    axes, held_grad = summed_axes(spec), _C.held_gradient(leaf)
    settled = settled_spec(leaf)
    torch_adds = not axes and (held_grad is None or held_grad._spec.sbp == settled.sbp)
    has_meta_piece = my_coordinate(spec.placement) is None and any(e.is_split for e in spec.sbp)
    if settled is not spec.settled or has_meta_piece:
        # Torch cannot add these: the gradient has another layout, or pieces on ``meta``.
        _C.watch(leaf, 0, _TAKE_ALL_BYTES)
    elif torch_adds:  # torch's own addition is correct
        _C.unwatch(leaf)
    elif not axes or my_coordinate(spec.placement) is None:
        _C.watch(leaf, -1, 0)  # no bucket: this rank takes part in no sum
    else:
        number = buckets.number_of(spec.placement, axes, spec.dtype)
        _C.watch(leaf, number, spec.largest_nbytes)


def assign(leaf: Any, value: Any) -> None:
    """Carry out ``leaf.grad = value`` for a plain or global ``value``, or None.

    A global ``value`` itself becomes the gradient, and a plain one is converted.
    """
    forget_record(leaf)
    if isinstance(value, torch.Tensor) and value is not leaf:
        value = _to_global_gradient(leaf, value)
        # Torch's setter would refuse a shard of another shape than the leaf's shard.
        if value._spec.sbp != leaf._spec.settled.sbp:
            set_raw_grad(leaf, value)
            watch_leaf(leaf)
            return
    with HookOff():
        torch.Tensor.grad.__set__(leaf, value)  # type: ignore[attr-defined]
    _C.drop_waiting(leaf)


def _to_global_gradient(leaf: Any, value: Any) -> Any:
    """Return ``value`` if it is global, else a global copy in the layout of ``leaf.grad``.

    Raises:
        RuntimeError: ``value`` has another shape or dtype than the leaf, or is on another
            placement.
    """
    spec: TensorSpec = leaf._spec
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise RuntimeError(
            f"grad: the gradient has shape {tuple(value.shape)} and {value.dtype}, and the tensor "
            f"is {spec}.\n  A gradient has the shape and the dtype of its tensor; convert it first."
        )
    global_value = compare_and_adopt(value, spec.placement, "grad")
    common_placement("grad", (leaf, global_value))
    if global_value is value:
        return value
    settled = settled_spec(leaf)
    return (
        global_value.clone()
        if global_value._spec is settled
        else rebox(global_value, settled, "grad")
    )


def take_gradient(leaf: Any, addend: torch.Tensor, unshared: bool) -> torch.Tensor | None:
    """Handle a new gradient of a leaf; return what torch has to add to ``.grad`` for it, or None.

    The C++ hook calls it for gradients that it cannot put into a bucket. None means that nothing is
    left to add: the gradient waits to be summed over ranks, or was added already.

    Args:
        leaf: the leaf that the gradient reaches.
        addend: this rank's shard of the gradient, in the dual spec of the leaf (P where it is B).
        unshared: whether nothing else refers to ``addend``, so that it may be overwritten.
    """
    spec: TensorSpec = leaf._spec
    hide(leaf)
    if summed_axes(spec) and _C.waiting_for(leaf)[0]:  # one backward runs inside another
        buckets.finish()
    dual, settled = spec.dual.with_dtype(addend.dtype), spec.settled.with_dtype(addend.dtype)
    target = settled if _C.is_synced() else dual
    held_grad = _C.held_gradient(leaf)
    if target is settled and settled_spec(leaf) is not spec.settled:
        _accumulate(leaf, addend, held_grad, settled_spec(leaf).with_dtype(addend.dtype))
        return None
    if held_grad is not None and _has_nothing_to_add(leaf, held_grad, target):
        set_raw_grad(leaf, None)  # this rank has no values to add, so torch stores the new gradient
        return plain(box(addend, dual, target))
    if held_grad is not None and held_grad._spec is not target:
        if torch.is_grad_enabled():
            # With create_graph the gradient has a history, so it is boxed differentiably, into a
            # new object.
            set_raw_grad(leaf, rebox(held_grad, target.with_dtype(held_grad.dtype), "gradient"))
        elif held_grad._spec is not settled and held_grad._spec is not dual:
            # The user chose its layout.
            return plain(box(addend, dual, held_grad._spec.with_dtype(addend.dtype)))
        elif target is settled and _can_defer_sum(leaf, held_grad, addend):
            # Both are P: one sum over ranks of the two together replaces the gradient.
            _C.wait(leaf, plain(held_grad) + addend, True)
            return None
        else:
            replace_shard(held_grad, run(plain(held_grad), held_grad._spec, target), target)
    _C.set_partial(leaf, target is dual)
    if target is settled and not torch.is_grad_enabled():
        total = buckets.sum_at_once(leaf, addend, unshared)
        if total is not None:
            return total
        if addend.dtype is spec.dtype and _can_defer_sum(leaf, held_grad, addend):
            _queue_for_sum(leaf, addend, unshared)
            return None
    return plain(box(addend, dual, target))


def _queue_for_sum(leaf: Any, addend: torch.Tensor, unshared: bool) -> None:
    """Queue a gradient of ``leaf`` to be summed over ranks: in a bucket, or alone if it is large.

    ``addend`` is this rank's part of the sum. ``unshared`` is True if no other object refers to
    ``addend``. A large addend that is shared is copied, as the sum is written into its memory.
    """
    if not buckets.goes_alone(leaf._spec):
        _C.wait(leaf, addend, False)
    elif unshared and addend.is_contiguous():
        _C.wait_alone(leaf, addend)
    else:
        _C.wait_alone(leaf, addend.clone(memory_format=torch.contiguous_format))


def _accumulate(leaf: Any, addend: torch.Tensor, held_grad: Any, target: TensorSpec) -> None:
    """Add ``addend`` to a ``.grad`` that has another layout than its leaf.

    The layout was set by ``set_gradient_layout``. Torch cannot do it, since it would make the
    gradient as large as the leaf.

    Args:
        leaf: the leaf.
        addend: this rank's shard of the new gradient, in the dual spec of the leaf.
        held_grad: the present ``.grad``, or None.
        target: the spec that ``.grad`` is to have.
    """
    dual = leaf._spec.dual.with_dtype(addend.dtype)
    if held_grad is not None and held_grad._spec is not dual and held_grad._spec.sbp != target.sbp:
        target = held_grad._spec.with_dtype(addend.dtype)  # the user chose its layout
    if held_grad is None or held_grad._spec is target:
        routes = [(dual, target)]
        if scattering.can_defer(leaf, addend) and all(overlap_flags(routes)):
            scattering.defer_gradients([leaf], [addend], routes)
            return
    if held_grad is not None and held_grad._spec is dual and not torch.is_grad_enabled():
        replace_shard(held_grad, box(plain(held_grad) + addend, dual, target), target)
    elif held_grad is None or torch.is_grad_enabled():
        boxed = box(addend, dual, target)
        previous = (
            held_grad
            if held_grad is None
            else plain(rebox(held_grad, target.with_dtype(held_grad.dtype)))
        )
        set_raw_grad(leaf, attach(boxed if previous is None else previous + boxed, target))
    elif not _has_nothing_to_add(leaf, held_grad, target):
        with HookOff():
            torch.Tensor.add_(held_grad, box(addend, dual, target))
    if not _torch_runs_hooks():
        for hook in tuple((leaf._post_accumulate_grad_hooks or {}).values()):
            hook(leaf)


@cache
def _torch_runs_hooks() -> bool:
    """Return whether torch runs a leaf's post-accumulate hooks if its gradient is None.

    ``_accumulate`` adds a gradient itself and gives torch None. Later releases of torch run the
    hooks then; with others ``_accumulate`` must call them.
    """
    called = []
    with hidden_from_modes(), torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        x.register_post_accumulate_grad_hook(called.append)
        _NoGradient.apply(x).backward()
    return bool(called)


class _NoGradient(torch.autograd.Function):
    """Autograd Function whose backward returns None, for the test of ``_torch_runs_hooks``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


def _has_nothing_to_add(leaf: Any, held_grad: Any, target: TensorSpec) -> bool:
    """Return whether this rank has nothing to add to ``held_grad``, which has the spec ``target``.

    True if the rank is outside the placement, ``held_grad`` is split and no graph is recorded. The
    rank then has a ``meta`` shard. Torch must not add to that: it would read the logical shape of
    ``held_grad``, which is not the shape of the shard.

    Args:
        leaf: the leaf.
        held_grad: its present ``.grad``.
        target: the spec that ``.grad`` is to have.
    """
    outside = my_coordinate(leaf._spec.placement) is None and not torch.is_grad_enabled()
    is_split = any(entry.is_split for entry in held_grad._spec.sbp)
    return outside and is_split and held_grad._spec is target.with_dtype(held_grad.dtype)


def _can_defer_sum(leaf: Any, held_grad: Any, addend: torch.Tensor) -> bool:
    """Return whether ``addend`` may be added later, after torch has run the leaf's hooks.

    It may not if the leaf has post-accumulate hooks, which must see the sum, or if a tensor is
    sparse.
    """
    is_strided = all(x.layout is torch.strided for x in (held_grad, addend) if x is not None)
    has_hooks = leaf._post_accumulate_grad_hooks is not None
    return is_strided and not has_hooks and my_coordinate(leaf._spec.placement) is not None


def replace_by_sum(leaf: Any, total: torch.Tensor) -> None:
    """Replace a leaf's P gradient by its sum ``total`` over ranks, in the same tensor object.

    C++ calls it when a sum arrives that includes what was accumulated inside ``no_sync()``.
    """
    held_grad = _C.held_gradient(leaf)
    replace_shard(held_grad, total, leaf._spec.settled.with_dtype(total.dtype))


@contextmanager
def no_sync() -> Iterator[None]:
    """Accumulate gradients without summing them over ranks, inside the context.

    The gradients of replicated (B) leaves stay partial sums (P) and add up; the next backward
    outside the context sums them over ranks once. Use it for all but the last micro-batch of a
    gradient accumulation. ``.grad`` is a correct global tensor at every moment; inside, it is P.
    """
    buckets.finish()  # if called inside a backward: sum the gradients that wait first
    was_synced = _C.set_sync(False)
    try:
        yield
    finally:
        _C.set_sync(was_synced)


_C.set_up_leaves(
    watch_leaf,
    assign,
    buckets.least_alone_bytes,
    buckets.bucket_limit,
    take_gradient,
    buckets.launch_bucket,
    scattering.send_bucket,
    replace_by_sum,
    buckets.finish,
    scattering.show,
)
