"""Checks, equal on every rank, whether autograd records an op, and cheap calls of Functions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

HookOff = torch._C.DisableTorchFunctionSubclass


def is_recording() -> bool:
    """Return whether autograd records ops on tensors that require grad; the same on every rank.

    False in inference mode, even inside ``enable_grad``. Torch's own answer would not do there: a
    view of an ordinary tensor requires grad, on the rank that has the elements, but a tensor of
    zeros, made on a rank that has none, does not.
    """
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def records(tensors: Iterable[Tensor]) -> bool:
    """Return whether autograd records an op on ``tensors`` for backward; the same on every rank."""
    return is_recording() and any(x.requires_grad for x in tensors)


def tracks(tensors: Iterable[Tensor]) -> bool:
    """Return whether autograd tracks an op on ``tensors``, in backward or forward mode (``jvp``).

    The answer is the same on every rank.
    """
    return records(tensors) or forward_ad._current_level >= 0


def is_accumulated(node: Any) -> bool:
    """Return whether the running backward adds what ``node`` gets to the ``.grad`` of a leaf.

    False for a node that is not that of a leaf, and for gradients that ``torch.autograd.grad``
    returns.
    """
    if not hasattr(node, "variable"):
        return False
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # torch.autograd.grad returns this gradient without accumulating it
        return False


def apply(function: Any, *args: Any) -> Any:
    """Call ``function.apply`` faster, without torch's Python method ``Function.apply`` around it.

    The check of that method for transforms is made here instead. Only functions of this library may
    be called this way, since they work on shards.

    Raises:
        RuntimeError: a ``torch.func`` transform is active.
    """
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "boxing: a torch.func transform (grad, vmap, jvp) is active.\n"
            "  It would see this rank's shard only, and boxing moves data between ranks.\n"
            "  Use torch.autograd.grad or backward on global tensors; in place of jvp, "
            "torch.autograd.functional.jvp or torch.autograd.forward_ad."
        )
    # Finds `apply` of Function's base class in C, bound to `function`.
    past_guard: Any = super(torch.autograd.Function, function)
    return past_guard.apply(*args)
