"""Gradients of global tensors: where backward starts, and what happens when a gradient reaches a
leaf.

Torch differentiates the local ops. The gradient of a tensor has the dual SBP (S -> S, B -> P, P ->
B), so backward starts from the dual of the loss, and a gradient that reaches a B leaf is P until it
is boxed. Leaf hooks sum large ones at once where ranks share memory, and collect the others in
buckets whose all-reduces overlap with the rest of backward; when backward ends, every leaf's
``.grad`` has the leaf's own SBP. Inside ``no_sync()`` gradients stay P and add up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..boxing import check
from ..boxing.plan import plan as plan_boxing
from ..boxing.run import here, run
from ..boxing.run import observers as boxing_observers
from ..spec import B, TensorSpec
from . import buckets
from .buckets import state
from .gradients import raw_grad, set_raw_grad, settled_spec
from .shards import HookOff, adopt, attach, plain, rebox


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
        buckets.settle(leaf)
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
    if grad is None or not state.sync:
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
    _observe(leaf)
    buckets.put(leaf, grad, axes)


def _observe(leaf: Any) -> None:
    dual, settled = leaf._spec.dual, settled_spec(leaf._spec, leaf._spec.dtype)
    if check.enabled:
        check.compare(dual, settled, "gradient")
    if boxing_observers:
        moves = plan_boxing(dual, settled)
        for observe in boxing_observers:
            observe(dual, settled, moves)


@contextmanager
def no_sync() -> Iterator[None]:
    """Inside, gradients of B leaves stay P and add up; the next backward outside boxes their sum
    once.

    Use it for all but the last micro-batch of a gradient accumulation. ``.grad`` is a right global
    tensor at every moment; inside it is P.
    """
    before, state.sync = state.sync, False
    try:
        yield
    finally:
        state.sync = before


def run_engine(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's backward engine, then finish the gradient buckets.

    Every rank must issue the same boxings in the same order. With several engine threads (CPU and
    CUDA nodes in one graph) two ranks could differ, so backward runs on one.
    """
    outermost = state.depth == 0
    state.depth += 1
    try:
        with torch.autograd.set_multithreading_enabled(False):
            result = engine(*args, **kwargs)
        if outermost:
            buckets.flush()
        return result
    except BaseException:
        if outermost:
            state.reset()
        raise
    finally:
        state.depth -= 1


def in_backward() -> bool:
    """Whether this thread is inside a backward pass."""
    return state.depth > 0
