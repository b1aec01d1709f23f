"""A change for recurrent layers, which pack their weights into one block of memory for cuDNN.

The shards of global weights are not packed: cuDNN runs on them where they are.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from ..tensor.global_tensor import GlobalTensor


def install() -> None:
    """Patch ``RNNBase.flatten_parameters`` to do nothing for global weights."""
    original: Callable[[Any], None] = torch.nn.RNNBase.flatten_parameters

    @functools.wraps(original)
    def flatten_parameters(self: Any) -> None:
        if not any(isinstance(weight, GlobalTensor) for weight in self._flat_weights):
            original(self)

    torch.nn.RNNBase.flatten_parameters = flatten_parameters  # type: ignore[method-assign]
