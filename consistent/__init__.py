"""One tensor, many devices: global tensors with a placement and an SBP, for PyTorch."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from . import data, nn, step
from . import pipeline as pipelines
from .autograd.leaves import no_sync
from .compiled import CannotRecord
from .compiled import compile_step as compile
from .movement.check_mode import check_mode
from .movement.plain_values import plain_may_differ
from .nn.master_weights import master_weights
from .nn.parallelize import parallelize, plan_of
from .nn.plan import Plan
from .nn.pretrained import from_pretrained
from .overlap.split_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .report import Explanation, Report, explain, report
from .spec import B, P, Placement, S, TensorSpec, sbp
from .tensor import from_mirrored  # noqa: F401  (mirror enters the way from the mirrored view)
from .tensor.global_tensor import GlobalTensor
from .tensor.making.create import distribute, from_local
from .tensor.making.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    normal,
    ones,
    rand,
    randint,
    randn,
    randperm,
    tensor,
    zeros,
)
from .tensor.making.scope import placement_scope
from .torch_patches.install import install_with_first_tensor

if TYPE_CHECKING:
    from . import checkpoint

placement = Placement

install_with_first_tensor()

nn.Graph, nn.graph, nn.pipeline = step.Graph, step, pipelines.pipeline

_LATER = ("checkpoint",)  # packages that import much of torch; imported when they are asked for


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "B",
    "CannotRecord",
    "Explanation",
    "GlobalTensor",
    "P",
    "Placement",
    "Plan",
    "Report",
    "S",
    "TensorSpec",
    "all_gather_matmul",
    "arange",
    "check_mode",
    "checkpoint",
    "compile",
    "data",
    "distribute",
    "empty",
    "explain",
    "eye",
    "from_local",
    "from_pretrained",
    "full",
    "linspace",
    "logspace",
    "master_weights",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "nn",
    "no_sync",
    "normal",
    "ones",
    "parallelize",
    "placement",
    "placement_scope",
    "plain_may_differ",
    "plan_of",
    "rand",
    "randint",
    "randn",
    "randperm",
    "report",
    "sbp",
    "tensor",
    "zeros",
]
