"""Activation checkpointing of marked modules: backward recomputes their activations."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

_RECOMPUTED = "_consistent_recomputed"


def recompute(module: torch.nn.Module, value: bool = True) -> None:
    """Mark ``module`` for activation checkpointing, or unmark it with ``value=False``.

    The mark has an effect only in calls inside the context ``recomputing``, in which ``Graph`` runs
    its steps.
    """
    module.__dict__[_RECOMPUTED] = bool(value)


def is_recomputed(module: torch.nn.Module) -> bool:
    """Return whether ``module`` is marked for activation checkpointing."""
    return module.__dict__.get(_RECOMPUTED, False)


@contextmanager
def recomputing(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Run the calls of marked modules under ``torch.utils.checkpoint`` inside the context.

    Modules are marked by ``recompute``; calls of unmarked modules are not changed.
    """
    marked_modules = [m for m in modules if is_recomputed(m)]
    previous_calls = [m.__dict__.get("_compiled_call_impl") for m in marked_modules]
    # Torch calls ``_compiled_call_impl`` instead of ``_call_impl`` if a module has one.
    for module in marked_modules:
        module.__dict__["_compiled_call_impl"] = functools.partial(_call_checkpointed, module)
    try:
        yield
    finally:
        for module, call in zip(marked_modules, previous_calls, strict=True):
            if call is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = call


def _call_checkpointed(module: Any, *args: Any, **kwargs: Any) -> Any:
    """Call ``module`` under a checkpoint, or as it is if no gradients are recorded."""
    if not torch.is_grad_enabled():
        return module._call_impl(*args, **kwargs)
    return checkpoint(module._call_impl, *args, use_reentrant=False, **kwargs)
