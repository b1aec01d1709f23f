"""Backward passes over global tensors: the first gradient, and how torch's engine runs.

Torch differentiates the local ops. The gradient of a tensor has the dual SBP (S for S, P for B, B
for P), so backward starts from a gradient in the dual SBP of the loss. ``leaves`` handles the
gradients that reach leaves.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch.autograd import graph

from mirrored.transports.failures import count_failure

from ..dispatch import _C
from ..dispatch.plans.shards import HookOff, compare_and_adopt, is_global, plain, rebox
from ..dispatch.running import refused_gradients
from ..dispatch.running.agreed import all_ranks, exchange_errors, ranks_of
from ..movement import check_mode
from ..movement.world import excludes_others, my_coordinate
from ..spec import Coordinate, P, TensorSpec
from ..spec.tracer import Tracer, callbacks
from . import buckets, scattering, unsummed

_ON_BACKWARD, _HANDLE_BACKWARD = callbacks("on_backward"), callbacks("handle_backward")


class _ThreadState(threading.local):
    """State of one thread: the number of its backward passes that have ended."""

    passes = 0


_thread = _ThreadState()


def is_handled() -> bool:
    """Return whether a tracer runs ``y.backward()`` in place of this module.

    Recorders of training steps do, by the callback ``handle_backward``.
    """
    return bool(_HANDLE_BACKWARD)


def pass_count() -> int:
    """Return the number of backward passes over global tensors that have ended in this thread.

    Code that keeps something until the end of a backward pass compares it with an earlier value.
    Passes that raised count, too. The number is the same on all ranks.
    """
    return _thread.passes


def backward(
    y: Any, gradient: torch.Tensor | None, retain_graph: bool | None, create_graph: bool
) -> None:
    """Run ``y.backward(...)`` for a global tensor: add the gradients of leaves to ``.grad``.

    The other arguments are those of ``torch.Tensor.backward``.
    """
    if _HANDLE_BACKWARD:
        _HANDLE_BACKWARD[-1](y, gradient, retain_graph, create_graph)
        return
    # This function of torch is patched (torch_patches/backward.py): it calls ``seed`` for the
    # gradient, and ``run_engine``.
    graph._engine_run_backward(
        (y,),
        (gradient,),
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


def seed(y: Any, gradient: torch.Tensor | None) -> torch.Tensor:
    """Return the local tensor with which torch's engine starts backward at ``y``.

    It is this rank's shard of the gradient of ``y``, in the dual SBP of ``y``: S for S, P for B, B
    for P. Without a ``gradient`` ``y`` is a scalar loss, whose gradient is 1. For a P loss (dual B)
    every rank starts from 1. For a B loss (dual P) the addends must sum to 1, so the first rank of
    each axis starts from 1 and the others from 0.
    """
    check_mode.set_current_op("backward")
    return _unit_gradient(y) if gradient is None else _shard_of_gradient(y, gradient)


def _unit_gradient(y: Any) -> torch.Tensor:
    """Return this rank's part of the gradient 1 of a scalar loss ``y``.

    Raises:
        RuntimeError: ``y`` is not a real scalar.
    """
    spec: TensorSpec = y._spec
    if spec.numel != 1 or not spec.dtype.is_floating_point:
        raise RuntimeError(
            f"grad can be implicitly created only for real scalar outputs, and this one is {spec}. "
            "Reduce it first (y.sum().backward()), or give y.backward(gradient=...)."
        )
    starts_from_one = _starts_from_one(spec, my_coordinate(spec.placement))
    with HookOff():
        return torch.ones_like(y) if starts_from_one else torch.zeros_like(y)


@lru_cache(maxsize=1 << 10)
def _starts_from_one(spec: TensorSpec, coordinate: Coordinate | None) -> bool:
    """Return whether a rank starts backward from 1, and not 0, for a loss of ``spec``.

    ``coordinate`` is the rank's in the placement, None outside. On an axis on which the dual of
    ``spec`` is P, only the first rank does, as the ranks' values are summed.
    """
    return coordinate is None or not any(
        e is P and i for e, i in zip(spec.dual.sbp, coordinate, strict=True)
    )


def _shard_of_gradient(y: Any, gradient: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of ``gradient``, which a user gave to ``y.backward(gradient)``.

    Raises:
        RuntimeError: it has another shape than ``y``, or is on another placement.
    """
    spec: TensorSpec = y._spec
    if tuple(gradient.shape) != tuple(spec.shape):
        raise RuntimeError(
            f"backward: gradient has shape {tuple(gradient.shape)}, and the tensor is {spec}. "
            f"Give a gradient of shape {tuple(spec.shape)}."
        )
    global_gradient = compare_and_adopt(gradient, spec.placement, "backward")
    if global_gradient._spec.placement != spec.placement:
        raise RuntimeError(
            f"backward: gradient is on {global_gradient._spec.placement}, and the tensor on "
            f"{spec.placement}. "
            "Move it first: gradient.to_global(placement=y.placement)."
        )
    return plain(rebox(global_gradient, spec.dual, "backward"))


def run_engine(engine: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run torch's backward engine on one thread, so that all ranks communicate in the same order.

    With several threads (the engine has one for each device) two ranks could issue the same boxings
    in different orders, and wait for each other forever.

    If the values of one rank make an op raise, all of its ranks raise (``refused_gradients``). Any
    other error, such as that of a user's hook, may be raised on one rank only, in the middle of
    the ranks' communication. After that, the messages of this rank no longer match those of the
    others.

    Args:
        engine: torch's function that runs backward.
        args, kwargs: its arguments.
    """
    was_threaded, was_nested = torch._C._is_multithreading_enabled(), _C.in_backward_of_shards(True)
    torch._C._set_multithreading_enabled(False)
    for notify in _ON_BACKWARD:
        notify(True)
    try:
        out = refused_gradients.run_backward(engine, *args, **kwargs)
    except BaseException as error:
        _C.take_nan_found()  # clears it, so that the next pass does not raise it
        if not in_backward():  # the outermost of nested passes
            buckets.reset()
            scattering.reset()
            if isinstance(error, Exception):
                count_failure(error)
        raise
    finally:
        _thread.passes += 1
        torch._C._set_multithreading_enabled(was_threaded)
        _C.in_backward_of_shards(was_nested)
        for notify in _ON_BACKWARD:
            notify(False)
    if torch.is_anomaly_enabled() and torch.is_anomaly_check_nan_enabled():
        _agree_on_nan(args[0])
    return out


def _agree_on_nan(roots: Sequence[Any]) -> None:
    """Raise on all ranks if torch's anomaly mode has found a NaN in backward on one of them.

    ``roots`` are the tensors from which backward started.
    """
    message = _C.take_nan_found()
    error = RuntimeError(message) if message else None
    if not excludes_others():  # ranks outside follow this pass, so they take part, too
        exchange_errors(error, all_ranks())
        return
    for placement in dict.fromkeys(y._spec.placement for y in roots if is_global(y)):
        if placement.size > 1 and my_coordinate(placement) is not None:
            exchange_errors(error, ranks_of(placement))
    if error is not None:
        raise error


def in_backward() -> bool:
    """Return whether this thread is inside a backward pass."""
    return torch._C._current_graph_task_id() != -1


# Used for sharded leaves that an op gathers as operands. Unlike a leaf of ZeRO-3, such a leaf keeps
# no gradient of the gathered size inside no_sync(), hence keep=False.
Tracer(handle_arriving=partial(unsummed.take_over_gradients, keep=False)).install()
