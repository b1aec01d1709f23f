"""Whether autograd records what is done to tensors, and functions of its that communicate."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

HookOff = torch._C.DisableTorchFunctionSubclass


def is_recording() -> bool:
    """Whether ops on tensors that require grad get a graph. Never in inference mode, also where
    ``enable_grad`` is entered in it: there a view of an ordinary tensor requires grad on the rank
    that has the elements, and not on one that makes zeros of its own."""
    return torch.is_grad_enabled() and not torch.is_inference_mode_enabled()


def records(tensors: Iterable[Tensor]) -> bool:
    """Whether an op on ``tensors`` gets a graph: the same on every rank."""
    return is_recording() and any(x.requires_grad for x in tensors)


def tracks(tensors: Iterable[Tensor]) -> bool:
    """Whether autograd, reverse or forward mode, follows an op on ``tensors``: the same on every
    rank."""
    return records(tensors) or forward_ad._current_level >= 0


def is_accumulated(node: Any) -> bool:
    """Whether ``node`` of a graph is a leaf's, and the backward that runs adds to its gradient;
    ``torch.autograd.grad`` does not."""
    if not hasattr(node, "variable"):
        return False
    try:
        return torch._C._will_engine_execute_node(node)  # type: ignore[attr-defined]
    except RuntimeError:  # the gradient is asked for, and not accumulated
        return False


def apply(function: Any, *args: Any) -> Any:
    """``function.apply``, bypassing the guard that keeps users' own autograd functions from global
    tensors."""
    if torch._C._are_functorch_transforms_active():
        raise RuntimeError(
            "boxing: a torch.func transform (grad, vmap, jvp) is active.\n"
            "  It would see this rank's shard only, and boxing moves data between ranks.\n"
            "  Use torch.autograd.grad or backward on global tensors; in place of jvp, "
            "torch.autograd.functional.jvp or torch.autograd.forward_ad."
        )
    past_guard: Any = super(torch.autograd.Function, function)
    return past_guard.apply(*args)
