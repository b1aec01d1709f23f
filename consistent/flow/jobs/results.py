"""Conversion of a job's results to numpy arrays, which are equal on every rank."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mirrored.mirrored_tensor import MirroredTensor

from ..ops.micro_batches import MicroBatches, pack
from ..typing import ListNumpy, Numpy, Several


def to_numpy(value: Any) -> Any:
    """Convert the results of a job's function to numpy arrays, the same on every rank.

    A global tensor becomes one array, a mirrored tensor a list with one array per device. Lists,
    tuples and dicts are converted item by item. A collective.
    """
    if isinstance(value, MicroBatches):
        return to_numpy(pack(value, len(value)))
    if isinstance(value, tuple | list):
        return Several(to_numpy(item) for item in value)
    if isinstance(value, dict):
        return {name: to_numpy(item) for name, item in value.items()}
    if isinstance(value, MirroredTensor):
        return ListNumpy(_to_array(x) for x in value.to_list())
    if isinstance(value, torch.Tensor):
        return _to_array(value).view(Numpy)
    return value


def _to_array(x: torch.Tensor) -> Any:
    # A copy: x may be a variable, which the next step changes.
    return np.array(x.detach().cpu().numpy())
