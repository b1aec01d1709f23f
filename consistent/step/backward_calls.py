"""Interception of the ``loss.backward()`` calls inside a step that is run as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from ..spec.tracer import Tracer, without_callbacks


@contextmanager
def intercept_backward(take: Callable[[Any, Callable[[Any], None]], None]) -> Iterator[None]:
    """Replace each ``loss.backward()`` inside the ``with`` block by a call ``take(loss, run)``.

    ``take`` can change the loss, and then calls ``run(loss)``, which runs the backward pass. So
    ``intercept_backward(lambda loss, run: run(loss / 2))`` halves all gradients. Micro-batches
    weight their losses in this way, and a gradient scaler scales them.
    """

    def take_global(y: Any, gradient: Any, retain: bool | None, create: bool) -> None:
        take(y, lambda x: _call_backward(x, gradient, retain, create))

    # The tracer sees losses that are global tensors, the mode those that are plain.
    with Tracer(handle_backward=take_global).tracing(), _PlainBackwardMode(take):
        yield


def _call_backward(y: Any, *args: Any, **kwargs: Any) -> None:
    """Run ``y.backward(...)`` itself, without passing it to ``take`` once more."""
    # Without this the call would be intercepted again.
    with without_callbacks("handle_backward"):
        y.backward(*args, **kwargs)


class _PlainBackwardMode(TorchFunctionMode):
    """Torch function mode that calls ``take(loss, run)`` for ``backward()`` of plain tensors.

    ``intercept_backward`` uses it together with a ``Tracer``, which does the same for losses that
    are global tensors.
    """

    def __init__(self, take: Callable[[Any, Callable[[Any], None]], None]) -> None:
        super().__init__()
        self._take = take

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        named = kwargs or {}
        if func is not torch.Tensor.backward:
            return func(*args, **named)
        self._take(args[0], lambda x: _call_backward(x, *args[1:], **named))
        return None
