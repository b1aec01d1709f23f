"""Calls that a plan answers by other calls: properties, numbers given as tensors, ``out=``, and
in-place ops that change a tensor's shape."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .shards import HookOff, plain

_Tensor = torch.Tensor

# Arguments that torch reads as a number even where a 0-d tensor is given.
NUMBERS = ("alpha", "beta")


def reshaped_in_place(name: str) -> Callable[..., Any]:
    """x.t_(), x.unsqueeze_(0), ...: ``x`` becomes its own view, spec and all."""

    def run(x: Any, *args: Any, **kwargs: Any) -> Any:
        if x.requires_grad:
            raise RuntimeError(
                f"{name}_: it changes the shape of {x._spec}, which requires grad, and the "
                "history of a global tensor "
                f"keeps its shape. Use x.{name}(...), which returns a new tensor."
            )
        view = getattr(_Tensor, name)(x, *args, **kwargs)
        with HookOff():
            _Tensor.data.__set__(x, plain(view))  # type: ignore[attr-defined]
        x._spec = view._spec
        return x

    return run


def with_hook_off(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        with HookOff():
            return run(*args, **kwargs)

    return call


def with_numbers(run: Callable[..., Any]) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        read = {k: v.item() for k, v in kwargs.items() if k in NUMBERS and isinstance(v, _Tensor)}
        return run(*args, **{**kwargs, **read})

    return call


def into_out(run: Callable[..., Any]) -> Callable[..., Any]:
    """``op(..., out=t)``: the op, boxed to where ``t`` lies and written into it."""

    def call(*args: Any, out: Any, **kwargs: Any) -> Any:
        result = run(*args, **kwargs)
        targets = out if isinstance(out, tuple | list) else (out,)
        results = result if isinstance(out, tuple | list) else (result,)
        for target, value in zip(targets, results, strict=True):
            if target.shape != value.shape:
                raise RuntimeError(
                    f"out=: the result has shape {tuple(value.shape)} and out has "
                    f"{tuple(target.shape)}, and a global "
                    "tensor is not resized. Give an out of the result's shape, or leave out= away."
                )
            target.copy_(value)
        return out

    return call
