"""OneFlow's early API as a thin layer over this library: ``import consistent.flow as flow``.

The programs of OneFlow's documents run with it (docs/from_seeds.md).

Every name that is not defined here is torch's: ``flow.matmul`` is ``torch.matmul``, ``flow.float``
is ``torch.float``.
"""

from typing import Any

import torch

from ..spec import sbp
from ..tensor.global_tensor import GlobalTensor
from . import (
    config,
    data,
    distribute,
    distributed,
    layers,
    losses,
    nn,
    optimizer,
    scope,
    train,
    typing,
)
from .jobs.function_config import FunctionConfig, function_config
from .jobs.job import Job, global_function
from .ops.micro_batches import MicroBatches, pack, unpack
from .ops.tensors import (
    arange,
    empty,
    full,
    ones,
    placement,
    rand,
    randint,
    randn,
    reshape,
    to_global,
    zeros,
)
from .session import clear_default_session
from .typing import FixedTensorDef, MirroredTensorDef
from .variables.initializers import (
    constant_initializer,
    ones_initializer,
    random_normal_initializer,
    random_uniform_initializer,
    truncated_normal,
    zeros_initializer,
)
from .variables.variable import get_variable

__all__ = [
    "FixedTensorDef",
    "FunctionConfig",
    "GlobalTensor",
    "Job",
    "MicroBatches",
    "MirroredTensorDef",
    "arange",
    "clear_default_session",
    "config",
    "constant_initializer",
    "data",
    "distribute",
    "distributed",
    "empty",
    "full",
    "function_config",
    "get_variable",
    "global_function",
    "layers",
    "losses",
    "nn",
    "ones",
    "ones_initializer",
    "optimizer",
    "pack",
    "placement",
    "rand",
    "randint",
    "randn",
    "random_normal_initializer",
    "random_uniform_initializer",
    "reshape",
    "sbp",
    "scope",
    "to_global",
    "train",
    "truncated_normal",
    "typing",
    "unpack",
    "zeros",
    "zeros_initializer",
]


def __getattr__(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)
    return getattr(torch, name)
