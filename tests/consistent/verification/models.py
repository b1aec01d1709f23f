"""Steps of models of transformers, code unchanged, in a dtype."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .faulty import Place

PLANS = ["data", "zero2", "zero3", "tensor"]


def step_of(name: str, dtype: torch.dtype) -> Callable[[Place], Any]:
    """Forward, backward and a step of SGD of the model ``name`` of tests/models."""
    from tests.models.architectures import MODELS

    MODELS[name]()  # its classes are imported once, here, and not by every rank that is forked
    return partial(_step, name, dtype)


def _step(name: str, dtype: torch.dtype, place: Place) -> torch.Tensor:
    from tests.models.architectures import MODELS

    def cast(x: Any) -> Any:
        return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    model, inputs = MODELS[name]()
    model = place(model.to(dtype).eval())
    loss = model(**{key: cast(x) for key, x in inputs.items()}).loss
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    return loss
