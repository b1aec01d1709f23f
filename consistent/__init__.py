"""Global tensors for PyTorch: one logical tensor whose shards are on many devices.

A global tensor has a *placement*, the ranks that hold it, and an *SBP* for each axis of the
placement: split, broadcast or partial sum.
"""

from importlib import import_module
from pathlib import Path as _Path
from typing import TYPE_CHECKING, Any

import mirrored as _mirrored
from mirrored.transports.faults.turns import in_this_thread

from . import data, nn, step
from . import pipeline as pipelines
from .autograd.leaves import no_sync
from .compiled import CannotRecord
from .compiled import compile_step as compile
from .doctor import owners as _owners
from .movement.check_mode import check_mode
from .movement.plain_values import plain_may_differ
from .nn.moving import move
from .nn.owned.matrix_step import matrix_step
from .nn.parallelize import parallelize, plan_of
from .nn.plan import Plan
from .nn.planners.data import data_parallel
from .nn.planners.zero import zero1, zero3
from .nn.pretrained import from_pretrained
from .nn.sharded.master_weights import master_weights
from .overlap.split_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from .report import Explanation, Report, explain, report
from .spec import B, P, Placement, S, TensorSpec, elsewhere, sbp
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
from .visualize import visualize

if TYPE_CHECKING:
    from . import auto, checkpoint, elastic, islands
    from .auto import search, simulate
    from .verification import verify

placement = Placement
"""Alias of ``Placement``, which prints under this name: ``placement(type, ranks, axes=None)``."""

_owners.check(*(_Path(path).resolve().parent for path in (__file__, _mirrored.__file__)))
install_with_first_tensor()
nn.Graph, nn.graph, nn.pipeline = step.Graph, step, pipelines.pipeline

# Names whose packages import much of torch are imported when they are first read:
# name -> (package, name in that package, or None for the package itself).
_LAZY = {
    "auto": ("auto", None),
    "checkpoint": ("checkpoint", None),
    "elastic": ("elastic", None),
    "islands": ("islands", None),
    "search": ("auto", "search"),
    "simulate": ("auto", "simulate"),
    "verify": ("verification", "verify"),
}


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
    "auto",
    "check_mode",
    "checkpoint",
    "compile",
    "data",
    "data_parallel",
    "distribute",
    "elastic",
    "empty",
    "explain",
    "eye",
    "from_local",
    "from_pretrained",
    "full",
    "in_this_thread",
    "islands",
    "linspace",
    "logspace",
    "master_weights",
    "matrix_step",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "move",
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
    "search",
    "simulate",
    "tensor",
    "verify",
    "visualize",
    "zero1",
    "zero3",
    "zeros",
]

if not TYPE_CHECKING:  # hidden from type checkers, so that they report unknown names

    def __getattr__(name: str) -> Any:
        if name in _LAZY:
            package, attribute = _LAZY[name]
            module = import_module(f".{package}", __name__)
            return module if attribute is None else getattr(module, attribute)
        raise elsewhere.missing_name_error(__name__, name, elsewhere.PACKAGE_HINTS, __all__)
