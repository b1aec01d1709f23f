"""The fused optimizer steps: ``torch._fused_adam_`` and similar ops.

They are elementwise in the tensors of a position (a parameter, its gradient and its state). If
these share one layout, the step runs on the shards. Otherwise it runs on copies in the layout of
the first global one, and the tensors that it writes to are boxed back.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ....movement.boxed import box
from ....movement.world import my_coordinate, whole_on_world
from ....spec import B, TensorSpec
from ...plans.shards import HookOff, adopt, is_global, plain, rebox
from ...running.moved_views import refuse_moved


def fused_step(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the fused step ``run`` to take tensors in any layout, on any placement, or plain.

    Used where ``run`` cannot work on the shards directly. All tensors of a parameter are boxed to
    one layout (see ``_target_spec``), the step runs at the positions that this rank holds, and what
    it has written is boxed back into the tensors of the caller.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        refuse_moved("_fused_step", args, kwargs)
        targets = [
            _target_spec(tensors) for tensors in zip(*(x for x in args[:2] if x), strict=True)
        ]
        held_positions = [
            i
            for i, spec in enumerate(targets)
            if spec is None or my_coordinate(spec.placement) is not None
        ]
        boxed = [_box_all(x, targets) if isinstance(x, tuple | list) else x for x in args]
        named = {key: _whole_value(x) for key, x in kwargs.items()}
        lists = [[x[i] for i in held_positions] if isinstance(x, list) and x else x for x in boxed]
        if held_positions:
            with HookOff():
                run(*lists, **named)
        for position, (before, after) in enumerate(zip(args, boxed, strict=True)):
            # Gradients, which come second, are written to only where the step unscales them.
            if isinstance(after, list) and (position != 1 or kwargs.get("grad_scale") is not None):
                for x, y in zip(before, after, strict=True):
                    _write_back(x, y)

    return call


def _target_spec(tensors: tuple[Any, ...]) -> TensorSpec | None:
    """Return the spec to which the tensors of one parameter are boxed, or None if all are plain.

    It is the spec of the first global tensor, with B in place of P. ``tensors`` are the parameter
    and its gradient.
    """
    spec = next((t._spec for t in tensors if is_global(t)), None)
    if spec is None:
        return None
    return spec.with_sbp(tuple(B if entry.is_partial else entry for entry in spec.sbp))


def _box_all(tensors: Any, targets: list[TensorSpec | None]) -> list[Any]:
    """Return ``tensors``, one per parameter, each boxed to the spec at its place in ``targets``.

    None in ``targets`` leaves a tensor as it is.
    """
    return (
        [_box_state(x, spec) for x, spec in zip(tensors, targets, strict=True)] if tensors else []
    )


def _box_state(x: Any, spec: TensorSpec | None) -> Any:
    """Return ``x`` boxed to ``spec``, or to B on the same placement if it has another shape.

    An ``x`` that is not global is taken as B first. A plain 0-d tensor, such as a step count, stays
    plain.
    """
    if spec is None or not isinstance(x, torch.Tensor) or (not is_global(x) and x.ndim == 0):
        return x
    operand = adopt(x, spec.placement, "fused step")
    # State of another shape, such as a step count, cannot be split like the parameter.
    sbp = spec.sbp if operand._spec.shape == spec.shape else (B,) * spec.placement.ndim
    target = TensorSpec.of(spec.placement, sbp, operand.shape, operand.dtype)
    return operand if operand._spec is target else rebox(operand, target, "fused step")


def _whole_value(x: Any) -> Any:
    """Return ``x`` as a plain tensor with all of its values, if it is global; else ``x``.

    Used for a learning rate that is a tensor, and for the tensors of GradScaler.
    """
    if not is_global(x):
        return x
    return plain(box(x.detach(), x._spec, whole_on_world(x._spec)))


def _write_back(x: Any, y: Any) -> None:
    """Write ``y``, a copy that the fused step has changed, into the caller's tensor ``x``.

    ``y`` is boxed to the layout of ``x`` for this. If ``x is y``, the step has written to it
    directly.
    """
    if x is y:
        return
    spec: TensorSpec = y._spec
    is_inside = my_coordinate(spec.placement) is not None
    caller_spec = x._spec if is_global(x) else spec.with_sbp((B,) * spec.placement.ndim)
    # Every rank boxes, since that is a collective; only ranks that hold ``x`` copy the result.
    value = box(plain(y.detach()), spec, caller_spec)
    if is_inside and value.data_ptr() != plain(x).data_ptr():
        with HookOff(), torch.no_grad():
            torch.Tensor.copy_(x, value)
