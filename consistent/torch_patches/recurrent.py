"""Recurrent layers pack their weights into one memory for cuDNN.

The shards of global weights stay where they are: cuDNN runs on them as it finds them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..tensor.global_tensor import GlobalTensor


def install() -> None:
    """Patch ``RNNBase.flatten_parameters``."""
    original: Callable[[Any], None] = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(original)
    def flatten_parameters(self: Any) -> None:
        if not any(isinstance(weight, GlobalTensor) for weight in self._flat_weights):
            original(self)

    torch.nn.RNNBase.flatten_parameters = flatten_parameters  # type: ignore[method-assign]
