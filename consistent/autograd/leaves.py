"""Leaves that other ranks hold too: how a new gradient is added to ``.grad``.

Autograd computes this rank's addend. A hook in C++ (``csrc/bindings/dispatch/gradients/leaf.cpp``)
takes the simple ones away before torch adds them: they wait for their bucket, and their sum is
added instead. The others come to ``take``, which gives torch a gradient in the layout of the one in
``.grad``.

``.grad`` is a correct global tensor at every moment, and so is every alias of it: where its layout
has to change (only inside and after ``no_sync()``), the object gets new memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch

from mirrored.transports.base.unseen import unseen

from ..dispatch import _C
from ..dispatch.planning.planning import common_placement
from ..dispatch.plans.gradients import set_raw_grad, settled_spec, summed_axes
from ..dispatch.plans.shards import HookOff, attach, lay_anew, plain, rebox, take_in
from ..movement.boxed import box
from ..movement.run import run
from ..movement.several import which_travel
from ..movement.world import my_coordinate
from ..spec import TensorSpec
from . import buckets, scattering
from .shown import forget, hide

# More bytes than any gradient has: those of such leaves all come to ``take``.
_ALWAYS_TAKEN = 1 << 62


def watch_leaf(leaf: Any) -> None:
    """From now on, sum the gradients of this leaf over the ranks that hold it too, and add them in
    the layout of the gradient that it has."""
    spec: TensorSpec = leaf._spec
    axes, held = summed_axes(spec), _C.held_gradient(leaf)
    settled = settled_spec(leaf)
    as_computed = not axes and (held is None or held._spec.sbp == settled.sbp)
    follows = my_coordinate(spec.placement) is None and any(e.is_split for e in spec.sbp)
    if settled is not spec.settled or follows:
        _C.watch(leaf, 0, _ALWAYS_TAKEN)
    elif as_computed:
        _C.unwatch(leaf)
    elif not axes or my_coordinate(spec.placement) is None:
        _C.watch(leaf, -1, 0)
    else:
        number = buckets.number_of(spec.placement, axes, spec.dtype)
        _C.watch(leaf, number, spec.largest_nbytes)


def assign(leaf: Any, value: Any) -> None:
    """Carry out ``leaf.grad = value``. A global ``value`` becomes the gradient as it is."""
    forget(leaf)
    if isinstance(value, torch.Tensor) and value is not leaf:
        value = _checked_gradient(leaf, value)
        if value._spec.sbp != leaf._spec.settled.sbp:  # its shard has another shape than the leaf's
            set_raw_grad(leaf, value)
            watch_leaf(leaf)
            return
    with HookOff():
        torch.Tensor.grad.__set__(leaf, value)  # type: ignore[attr-defined]
    _C.drop_waiting(leaf)


def _checked_gradient(leaf: Any, value: Any) -> Any:
    """A gradient for the leaf: ``value`` itself if it is global, else a copy in the settled layout
    of the leaf."""
    spec: TensorSpec = leaf._spec
    if value.shape != spec.shape or value.dtype != spec.dtype:
        raise RuntimeError(
            f"grad: the gradient has shape {tuple(value.shape)} and {value.dtype}, and the tensor "
            f"is {spec}.\n  A gradient has the shape and the dtype of its tensor; convert it first."
        )
    given = take_in(value, spec.placement, "grad")
    common_placement("grad", (leaf, given))
    if given is value:
        return value
    settled = settled_spec(leaf)
    return given.clone() if given._spec is settled else rebox(given, settled, "grad")


def take(leaf: Any, addend: torch.Tensor, unshared: bool) -> torch.Tensor | None:
    """The gradient that torch adds to the leaf's instead of ``addend``, which has the dual spec;
    None if the addend waits for its sum.

    ``unshared``: nobody else holds ``addend``, so that it may be overwritten.
    """
    spec: TensorSpec = leaf._spec
    hide(leaf)
    if summed_axes(spec) and _C.waiting_for(leaf)[0]:  # one backward runs inside another
        buckets.finish()
    dual, whole = spec.dual.with_dtype(addend.dtype), spec.settled.with_dtype(addend.dtype)
    wanted = whole if _C.is_synced() else dual
    held = _C.held_gradient(leaf)
    if wanted is whole and settled_spec(leaf) is not spec.settled:
        _accumulate(leaf, addend, held, settled_spec(leaf).with_dtype(addend.dtype))
        return None
    if held is not None and _follows(leaf, held, wanted):
        set_raw_grad(leaf, None)  # torch stores the new one: there are no values to add
        return plain(box(addend, dual, wanted))
    if held is not None and held._spec is not wanted:
        if torch.is_grad_enabled():
            set_raw_grad(leaf, rebox(held, wanted.with_dtype(held.dtype), "gradient"))
        elif held._spec is not whole and held._spec is not dual:  # the user chose its layout
            return plain(box(addend, dual, held._spec.with_dtype(addend.dtype)))
        elif wanted is whole and _may_wait(leaf, held, addend):
            _C.wait(leaf, plain(held) + addend, True)
            return None
        else:
            lay_anew(held, run(plain(held), held._spec, wanted), wanted)
    _C.set_partial(leaf, wanted is dual)
    if wanted is whole and not torch.is_grad_enabled():
        summed = buckets.sum_at_once(leaf, addend, unshared)
        if summed is not None:
            return summed
        if addend.dtype is spec.dtype and _may_wait(leaf, held, addend):
            _let_wait(leaf, addend, unshared)
            return None
    return plain(box(addend, dual, wanted))


def _let_wait(leaf: Any, addend: torch.Tensor, unshared: bool) -> None:
    """Let ``addend`` wait for its sum: in a bucket or, if it is large, by itself and without a
    copy."""
    if not buckets.goes_alone(leaf._spec):
        _C.wait(leaf, addend, False)
    elif unshared and addend.is_contiguous():
        _C.wait_alone(leaf, addend)
    else:
        _C.wait_alone(leaf, addend.clone(memory_format=torch.contiguous_format))


def _accumulate(leaf: Any, addend: torch.Tensor, held: Any, wanted: TensorSpec) -> None:
    """Add to the gradient of a leaf whose gradients lie in another layout than the leaf: torch
    would make them as large as the leaf."""
    dual = leaf._spec.dual.with_dtype(addend.dtype)
    if held is not None and held._spec is not dual and held._spec.sbp != wanted.sbp:
        wanted = held._spec.with_dtype(addend.dtype)  # the user chose its layout
    if held is None or held._spec is wanted:
        routes = [(dual, wanted)]
        if scattering.may_be_later(leaf, addend) and all(which_travel(routes)):
            scattering.add_later([leaf], [addend], routes)
            return
    if held is not None and held._spec is dual and not torch.is_grad_enabled():
        lay_anew(held, box(plain(held) + addend, dual, wanted), wanted)
    elif held is None or torch.is_grad_enabled():
        new = box(addend, dual, wanted)
        before = held if held is None else plain(rebox(held, wanted.with_dtype(held.dtype)))
        set_raw_grad(leaf, attach(new if before is None else before + new, wanted))
    elif not _follows(leaf, held, wanted):
        with HookOff():
            torch.Tensor.add_(held, box(addend, dual, wanted))
    if not _torch_runs_hooks():
        for hook in tuple((leaf._post_accumulate_grad_hooks or {}).values()):
            hook(leaf)


@cache
def _torch_runs_hooks() -> bool:
    """Whether torch calls the hooks after a gradient where there was none to accumulate, as it does
    from some release on."""
    called = []
    with unseen(), torch.enable_grad():
        x = torch.ones((), requires_grad=True)
        x.register_post_accumulate_grad_hook(called.append)
        _NoGradient.apply(x).backward()
    return bool(called)


class _NoGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> None:  # type: ignore[override]
        return None


def _follows(leaf: Any, held: Any, wanted: TensorSpec) -> bool:
    """Whether this rank has no part of the gradient, which lies in pieces as it is to lie: torch's
    functions for ``meta`` would ask ``held`` for its shape, which is not that of a piece."""
    outside = my_coordinate(leaf._spec.placement) is None and not torch.is_grad_enabled()
    is_split = any(entry.is_split for entry in held._spec.sbp)
    return outside and is_split and held._spec is wanted.with_dtype(held.dtype)


def _may_wait(leaf: Any, held: Any, addend: torch.Tensor) -> bool:
    """Whether the addend may be added later, after torch has run the hooks that come next."""
    strided = all(x.layout is torch.strided for x in (held, addend) if x is not None)
    seen = leaf._post_accumulate_grad_hooks is not None
    return strided and not seen and my_coordinate(leaf._spec.placement) is not None


def settle(leaf: Any, total: torch.Tensor) -> None:
    """``total`` takes the place of the gradient that the leaf held as P."""
    held = _C.held_gradient(leaf)
    lay_anew(held, total, leaf._spec.settled.with_dtype(total.dtype))


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, gradients of B leaves stay P and add up; the next backward outside boxes their sum
    once.

    Use it for all but the last micro-batch of a gradient accumulation. ``.grad`` is a correct
    global tensor at every moment; inside, it is P.
    """
    buckets.finish()  # inside a backward: gradients that wait are summed first
    before = _C.set_sync(False)
    try:
        yield
    finally:
        _C.set_sync(before)


_C.set_up_leaves(
    watch_leaf,
    assign,
    buckets.at_once,
    buckets.limit,
    take,
    buckets.launch,
    scattering.send,
    settle,
    buckets.finish,
    scattering.show,
)
