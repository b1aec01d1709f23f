"""Recording of the ops that a program runs, each with its flops and memory traffic (``Work``)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...cost_model.work import Work
from ...spec.nested import map_tensors
from .work import work_of


def record_works(run: Callable[[], object]) -> list[Work]:
    """Run ``run()`` and return the ``Work`` (flops, bytes, description) of each op in order.

    Views are included.
    """
    with _WorkRecorder() as recorder:
        run()
    return recorder.recorded


class _WorkRecorder(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[Work] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        # Subclasses of tensors must not handle the op a second time here.
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            plain_args, plain_kwargs, result = map_tensors(
                (args, kwargs or {}, out), _as_plain_tensor
            )
            self.recorded.append(work_of(func, plain_args, plain_kwargs, result))
        return out


def _as_plain_tensor(x: torch.Tensor) -> torch.Tensor:
    return torch.Tensor.as_subclass(x, torch.Tensor)  # type: ignore[arg-type]
