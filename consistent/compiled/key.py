"""Keys by which a compiled step looks up its programs: the arguments of the call, and torch's
modes."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from ..dispatch import _C
from ..dispatch.planning import autocast
from ..dispatch.plans.shards import is_global
from ..spec.nested import replace_instances, tensors_in
from .memory import geometry, has_memory, storage_of


def key_of(args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return the key of a call: its arguments, how they share memory, and torch's modes.

    Calls with equal keys may run the same program. Tensors count by layout, shape and dtype, other
    arguments by value. Return None if the arguments cannot be compared, so that the call cannot run
    a program.
    """
    tensors = tensors_in((args, kwargs))
    memories = [storage_of(x) if has_memory(x) else -1 - i for i, x in enumerate(tensors)]
    # For each tensor, the first tensor with the same storage, and the offset if there are several.
    sharing = tuple(
        (memories.index(m), geometry(x)[0] if memories.count(m) > 1 else 0)
        for m, x in zip(memories, tensors, strict=True)
    )
    modes = (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        autocast.autocast_state(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        _C.is_synced(),
    )
    try:
        arguments = replace_instances(
            (args, kwargs), torch.Tensor, [_tensor_metadata(x) for x in tensors]
        )
        return _to_hashable(arguments), sharing, modes
    except TypeError:
        return None


def key_without_sizes(key: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return ``key`` without the sizes of tensors, for a call with the arguments ``args, kwargs``.

    Calls with equal results differ only in sizes. If one of them is recorded, the optimizers have
    their state, so a call with further sizes is recorded at once, without a first call as written.
    """
    _, *others = key
    metadata = [_metadata_without_sizes(x) for x in tensors_in((args, kwargs))]
    return _to_hashable(replace_instances((args, kwargs), torch.Tensor, metadata)), *others


def _metadata_without_sizes(x: Any) -> Any:
    if is_global(x):
        spec = x._spec
        return spec.placement, spec.sbp, x.dtype, x.dim(), x.requires_grad
    return x.dim(), x.layout, x.dtype, x.device, x.requires_grad


def _tensor_metadata(x: Any) -> Any:
    if is_global(x):
        return x._spec, x.requires_grad
    return (
        tuple(x.shape),
        x.stride() if has_memory(x) else x.layout,
        x.dtype,
        x.device,
        x.requires_grad,
    )


def _to_hashable(value: Any) -> Any:
    """Return ``value`` in a hashable form that compares by value and type.

    Example: ``{"a": [1]}`` becomes ``(("a", ("list", (int, 1))),)``.

    Raises:
        TypeError: ``value`` contains an object that cannot be hashed.
    """
    if isinstance(value, dict):
        return tuple((k, _to_hashable(v)) for k, v in value.items())
    if isinstance(value, list | tuple):
        return type(value).__name__, *map(_to_hashable, value)
    if isinstance(value, set | frozenset):
        return type(value).__name__, frozenset(map(_to_hashable, value))
    if isinstance(value, slice):
        return "slice", value.start, value.stop, value.step
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = (getattr(value, f.name) for f in dataclasses.fields(value))
        return type(value), *map(_to_hashable, fields)
    if type(value).__module__ == "numpy" and hasattr(value, "tobytes"):
        # By bytes, since == on arrays returns an array.
        array: Any = value
        return "numpy", array.shape, str(array.dtype), array.tobytes()
    hash(value)
    # With the type, since 1 == 1.0 == True.
    return type(value), value
