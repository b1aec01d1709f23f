"""Reconstruction of a global tensor from the contents of a file, all of which are checked.

Anybody may have written the file, and native code relies on a shard that matches its spec.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch

from mirrored.transports.default import current

from ...dispatch.plans.shards import attach
from ...movement.world import device_of, my_coordinate
from ...spec import Coordinate, Placement, TensorSpec, invalid_dtype_reason

# Attributes that belong to one object and are not copied to its copies.
UNSAVED_ATTRIBUTES = ("_spec", "_moved_view", "_in_step", "_data_was_read", "_grad_coder")

_MAX_BYTES = 1 << 62  # of a tensor, so that no size overflows


def restored_tensor(
    local: Any, layout: Any, saved_at: Any, *, requires_grad: Any, extra: Any
) -> Any:
    """Return the global tensor that a file contains on this rank: a shard with its layout.

    This rank must be at the coordinate of the placement at which the shard was saved.

    Args:
        local: this rank's shard, a plain tensor; None outside the placement.
        layout: ((device type, ranks, names of axes), sbp as text, shape, dtype).
        saved_at: coordinate of the rank that saved it.
        requires_grad: whether the tensor requires grad.
        extra: further attributes of the tensor.

    Raises:
        RuntimeError: the shard was saved by a rank at another coordinate.
        ValueError: the parts do not fit together; ``torch.save`` did not write them.
    """
    spec = _checked_spec(layout, saved_at)
    coordinate = my_coordinate(spec.placement)
    if coordinate != saved_at:
        raise _other_rank_error(saved_at, str(spec.placement), f"at {coordinate}")
    if type(requires_grad) is not bool:
        _refuse(f"requires_grad is a {type(requires_grad).__name__}, and not True or False")
    x = attach(_checked_shard(local, spec, coordinate), spec)
    _check_extra(type(x), extra)
    x.__dict__.update(extra)
    return x.requires_grad_() if requires_grad else x


def _refuse(why: str) -> NoReturn:
    """Raise the ValueError for contents of a file that this library cannot have written."""
    raise ValueError(
        f"load: {why}, so this is no global tensor that torch.save wrote. Get the file again, or "
        "take another one."
    )


def _other_rank_error(saved_at: Any, placement: str, where: str) -> RuntimeError:
    """Return the error for a shard that was saved by a rank at another coordinate."""
    return RuntimeError(
        f"load: this is the shard of a global tensor that the rank at {saved_at} of {placement} "
        f"saved or sent, and this rank is {where}. Use x.full() to save or send the whole tensor, "
        "or load on every rank the file that it saved itself. consistent.checkpoint.save writes "
        "what any number of ranks loads, and consistent.checkpoint.full_state_dict(module) is a "
        "whole state dict on one rank."
    )


def _checked_spec(layout: Any, saved_at: Any) -> TensorSpec:
    """Return the spec that ``layout`` of a file describes, after checking every part of it."""
    if not (_is_tuple(layout, 4) and _is_tuple(layout[0], 3)):
        _refuse("its layout is not a grid of ranks, an SBP, a shape and a dtype")
    (kind, ranks, axes), sbp, shape, dtype = layout
    if not (saved_at is None or _is_tuple_of_ints(saved_at)):
        _refuse("the place where it was saved is not a coordinate")
    if not (axes is None or (type(axes) is tuple and all(type(a) is str for a in axes))):
        _refuse("the names of its axes are not texts")
    if type(sbp) is not str or not isinstance(dtype, torch.dtype):
        _refuse("its SBP is not a text, or its dtype not one of torch's")
    if (
        not _is_tuple_of_ints(shape)
        or min(shape, default=0) < 0
        or _bounded_nbytes(shape, dtype) > _MAX_BYTES
    ):
        _refuse("its shape is not one of a tensor")
    world = current().size
    flat_ranks = _flat_ranks(ranks, world)
    if flat_ranks is None:
        _refuse("its placement is not a grid of ranks")
    if not flat_ranks or max(flat_ranks) >= world:
        raise _other_rank_error(
            saved_at, f"ranks {ranks if flat_ranks else '...'}", f"in a world of {world}"
        )
    spec = TensorSpec.of(Placement(kind, ranks, axes), sbp, shape, dtype)
    mismatch = invalid_dtype_reason(spec)
    if mismatch is not None:
        _refuse(mismatch)
    return spec


def _is_tuple(x: Any, size: int) -> bool:
    # The exact type, since a subclass from the file may behave differently.
    return type(x) is tuple and len(x) == size


def _is_tuple_of_ints(x: Any) -> bool:
    return isinstance(x, tuple) and all(type(n) is int for n in x)


def _bounded_nbytes(shape: Any, dtype: torch.dtype) -> int:
    """Return the bytes of a tensor; if over ``_MAX_BYTES``, just some number over it."""
    total = dtype.itemsize
    for n in shape:
        total *= max(n, 1)  # even if a size is 0, torch must be able to take the others
        if total > _MAX_BYTES:
            break
    return total


def _flat_ranks(ranks: Any, world: int) -> list[int] | None:
    """Return the ints in nested lists of ranks, flattened: [[0, 1], [2, 3]] -> [0, 1, 2, 3].

    [] if there are more ints than the world has ranks, None if the lists hold anything else. The
    number of steps is bounded, since a malicious file may nest one list in many others.
    """
    flat_ranks: list[int] = []
    stack, steps = [(ranks, 0)], 0
    while stack:
        item, depth = stack.pop()
        steps += 1
        if type(item) is int:
            flat_ranks.append(item)
        elif type(item) is list and depth < 16 and item:
            stack += [(inner, depth + 1) for inner in item[: world + 1]]
        else:
            return None
        if len(flat_ranks) > world or steps > 16 * (world + 1):
            return []
    return flat_ranks


def _checked_shard(local: Any, spec: TensorSpec, coordinate: Coordinate | None) -> torch.Tensor:
    """Return the shard ``local``, read from a file, after checking it against ``spec``.

    ``coordinate`` is this rank's coordinate in the placement, None outside.
    """
    shape = spec.local_shape(coordinate)
    if coordinate is None:
        if local is not None:
            _refuse("it has a shard of a rank that is outside its placement")
        return torch.empty(shape, dtype=spec.dtype, device="meta")
    if type(local) is not torch.Tensor or local.layout is not torch.strided or local.is_quantized:
        _refuse(f"its shard is a {type(local).__name__}, and not a plain dense tensor")
    if local.is_meta or not local.is_contiguous():
        _refuse("its shard has no values, or not in the order in which they are written")
    if tuple(local.shape) != shape or local.dtype != spec.dtype:
        _refuse(
            f"its shard is {local.dtype} {list(local.shape)}, where {spec} has {list(shape)} here"
        )
    # A new object, since the file may refer to the same shard elsewhere, and `attach` changes its
    # class.
    return local.detach().to(device_of(spec.placement))


def _check_extra(cls: type, extra: Any) -> None:
    """Raise if ``extra``, attributes read from a file, would replace any of the class ``cls``."""
    if type(extra) is not dict:
        _refuse(f"its further attributes are a {type(extra).__name__}, and not a dictionary")
    for name in extra:
        if type(name) is not str or name in UNSAVED_ATTRIBUTES or hasattr(cls, name):
            _refuse(f"it would replace the attribute {str(name)[:40]!r} of global tensors")
