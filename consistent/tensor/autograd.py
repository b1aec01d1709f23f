"""Gradients of global tensors: where backward starts, and what happens when a gradient reaches a
leaf.

Torch differentiates the local ops. The gradient of a tensor has the dual SBP (S -> S, B -> P, P ->
B), so backward starts from the dual of the loss, and a gradient that reaches a B leaf is P until it
is boxed. Leaf hooks collect such gradients in buckets whose all-reduces overlap with the rest of
backward; when backward ends, every leaf's ``.grad`` has the leaf's own SBP. Inside ``no_sync()``
gradients stay P and add up.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mirrored import comm

from ..boxing import check
from ..boxing.plan import plan as plan_boxing
from ..boxing.run import here, run
from ..boxing.run import observers as boxing_observers
from ..spec import B, TensorSpec, dual_nd
from . import _C
from .shards import HookOff, adopt, attach, plain, rebox

# Buckets go out as they fill. 25 MB is DistributedDataParallel's default; the first is small so
# that the wire starts working early.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20


def seed(y: Any, gradient: torch.Tensor | None) -> torch.Tensor:
    """The local tensor that backward starts from at ``y``: the gradient boxed to the dual of
    ``y``'s spec.

    A P loss gets ones on every rank; a B loss gets ones on the first rank of each axis and zeros
    elsewhere.
    """
    check.calling("backward")
    spec: TensorSpec = y._spec
    whole = spec.with_sbp((B,) * spec.placement.ndim)
    if gradient is None:
        if spec.numel != 1:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, and this one is {spec}. "
                "Reduce it first (y.sum().backward()), or give y.backward(gradient=...)."
            )
        device = "meta" if here(spec.placement) is None else plain(y).device
        gradient = torch.ones(spec.shape, dtype=spec.dtype, device=device)
        return run(gradient, whole, spec.dual)
    if tuple(gradient.shape) != tuple(spec.shape):
        raise RuntimeError(
            f"backward: gradient has shape {tuple(gradient.shape)}, and the tensor is {spec}. "
            f"Give a gradient of shape {tuple(spec.shape)}."
        )
    given = adopt(gradient, spec.placement, "backward")
    if given._spec.placement != spec.placement:
        raise RuntimeError(
            f"backward: gradient is on {given._spec.placement}, and the tensor on "
            f"{spec.placement}. "
            "Move it first: gradient.to_global(placement=y.placement)."
        )
    return plain(rebox(given, spec.dual, "backward"))


# -- leaves ----------------------------------------------------------------------------------------


class _State(threading.local):
    """What one thread's backward has in flight."""

    def __init__(self) -> None:
        self.sync = True
        self.depth = 0
        self.reset()

    def reset(self) -> None:
        self.open: dict[tuple, list[Any]] = {}
        self.flying: list[_Bucket] = []
        self.launched = 0


_state = _State()


class _Bucket:
    """Leaves whose gradients are being summed in one flat all-reduce over one set of axes."""

    __slots__ = ("leaves", "flat", "handles", "axes")

    def __init__(self, leaves: list[Any], axes: tuple[int, ...]):
        self.leaves, self.axes = leaves, axes
        grads = [raw_grad(leaf) for leaf in leaves]
        self.flat = torch.cat([plain(g).reshape(-1) for g in grads])
        placement = leaves[0]._spec.placement
        at = here(placement)
        self.handles: list[Any] = []
        if at is not None:
            # Axes after the first wait for the one before; one axis is the common case.
            ranks = placement.axis_ranks(axes[0], at)
            self.handles.append(comm.current().all_reduce_async(self.flat, ranks))

    def finish(self) -> None:
        placement = self.leaves[0]._spec.placement
        at = here(placement)
        flat = self.flat
        if at is not None:
            flat = self.handles[0].wait()
            for axis in self.axes[1:]:
                flat = comm.current().all_reduce(flat, placement.axis_ranks(axis, at))
        position = 0
        for leaf in self.leaves:
            grad = raw_grad(leaf)
            n = plain(grad).numel()
            with torch.no_grad(), HookOff():
                piece = flat[position : position + n].view(torch.Tensor.size(grad))
                torch.Tensor.copy_(grad, piece)
            position += n
            attach(grad, settled_spec(leaf._spec, grad.dtype))


# (leaf) -> the gradient as torch holds it, typed as a global tensor; None if there is none.
raw_grad = _C.gradient


def type_gradient(leaf: Any, grad: torch.Tensor) -> Any:
    """``grad``, which autograd has just made of a leaf: a local tensor in the dual SBP."""
    if grad._is_zerotensor():  # one that autograd knows to be zero has no memory
        grad = grad.clone()
        set_raw_grad(leaf, grad)
    return attach(grad, leaf._spec.dual.with_dtype(grad.dtype))


def set_raw_grad(leaf: Any, grad: Any) -> None:
    """Store a gradient as torch holds it."""
    with HookOff():
        torch.Tensor.grad.__set__(leaf, grad)  # type: ignore[attr-defined]


def settled_spec(spec: TensorSpec, dtype: torch.dtype) -> TensorSpec:
    """Where the gradient of a leaf with ``spec`` ends: as the leaf lies, and B where the leaf is
    P (as it comes out)."""
    if any(entry.is_partial for entry in spec.sbp):
        spec = spec.with_sbp(tuple(B if entry.is_partial else entry for entry in spec.sbp))
    return spec.with_dtype(dtype)


def watch_leaf(leaf: Any) -> None:
    """Attach the hooks that box this leaf's gradient. Idempotent."""
    if leaf._watched or not any(entry is B for entry in leaf._spec.sbp):
        return
    leaf._watched = True
    with HookOff():
        torch.Tensor.register_hook(leaf, _Before(leaf))
        torch.Tensor.register_post_accumulate_grad_hook(leaf, _gradient_added)


class _Before:
    """Runs when a leaf's new gradient (P) is known, before it is added to the one the leaf has.

    A gradient that is already boxed must become P again first: its first rank keeps it, the others
    zero theirs.
    """

    __slots__ = ("_leaf",)

    def __init__(self, leaf: Any):
        import weakref

        self._leaf = weakref.ref(leaf)

    def __call__(self, grad: torch.Tensor) -> None:
        leaf = self._leaf()
        if leaf is None:
            return
        _settle(leaf)
        held = raw_grad(leaf)
        if held is None:
            return
        spec, wanted = held._spec, leaf._spec.dual.with_dtype(held._spec.dtype)
        if spec is not wanted:
            with torch.no_grad():
                back = run(plain(held), spec, wanted)
                with HookOff():
                    torch.Tensor.copy_(held, back)
            attach(held, wanted)


def _gradient_added(leaf: Any) -> None:
    """Runs after a new gradient was added to a leaf: put it into a bucket."""
    grad = raw_grad(leaf)
    if grad is None or not _state.sync:
        return
    spec = leaf._spec
    axes = tuple(
        axis for axis, entry in enumerate(spec.sbp) if entry is B and spec.placement.shape[axis] > 1
    )
    if not axes:
        attach(grad, settled_spec(spec, grad.dtype))
        return
    if grad.layout is not torch.strided or (torch.is_grad_enabled() and grad.requires_grad):
        # Sparse, or part of a graph that will be differentiated again: box it by itself.
        set_raw_grad(leaf, rebox(grad, settled_spec(spec, grad.dtype), "gradient"))
        return
    key = (spec.placement, axes, grad.dtype)
    bucket = _state.open.setdefault(key, [])
    bucket.append(leaf)
    _observe(leaf)
    limit = BUCKET_BYTES if _state.launched else FIRST_BUCKET_BYTES
    if sum(plain(raw_grad(x)).nbytes for x in bucket) >= limit:
        _launch(key)


def _observe(leaf: Any) -> None:
    dual, settled = leaf._spec.dual, settled_spec(leaf._spec, leaf._spec.dtype)
    if check.enabled:
        check.compare(dual, settled, "gradient")
    if boxing_observers:
        moves = plan_boxing(dual, settled)
        for observe in boxing_observers:
            observe(dual, settled, moves)


def _launch(key: tuple) -> None:
    leaves = _state.open.pop(key, [])
    if leaves:
        _state.flying.append(_Bucket(leaves, key[1]))
        _state.launched += 1


def _settle(leaf: Any) -> None:
    """Finish the bucket that holds ``leaf``, if one does: the leaf gets a second gradient in one
    backward."""
    waiting = any(x is leaf for bucket in _state.open.values() for x in bucket)
    if waiting or any(x is leaf for bucket in _state.flying for x in bucket.leaves):
        flush()


def flush() -> None:
    """Finish all gradient reductions in flight."""
    for key in list(_state.open):
        _launch(key)
    flying, _state.flying, _state.launched = _state.flying, [], 0
    for bucket in flying:
        bucket.finish()


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, gradients of B leaves stay P and add up; the next backward outside boxes their sum
    once.

    Use it for all but the last micro-batch of a gradient accumulation. ``.grad`` is a right global
    tensor at every moment; inside it is P.
    """
    before, _state.sync = _state.sync, False
    try:
        yield
    finally:
        _state.sync = before


def run_engine(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's backward engine, then finish the gradient buckets.

    Every rank must issue the same boxings in the same order. With several engine threads (CPU and
    CUDA nodes in one graph) two ranks could differ, so backward runs on one.
    """
    outermost = _state.depth == 0
    _state.depth += 1
    try:
        with torch.autograd.set_multithreading_enabled(False):
            result = engine(*args, **kwargs)
        if outermost:
            flush()
        return result
    except BaseException:
        if outermost:
            _state.reset()
        raise
    finally:
        _state.depth -= 1


def gradient_spec(x: Any, dtype: torch.dtype) -> TensorSpec:
    """Spec of the raw gradient that autograd computes for ``x``."""
    spec: TensorSpec = x._spec
    return spec.with_sbp(dual_nd(spec.sbp)).with_dtype(dtype)


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return _state.depth > 0
