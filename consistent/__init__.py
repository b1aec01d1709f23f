"""One tensor, many devices: global tensors with a placement and an SBP, for PyTorch."""

from .boxing.check import check_mode
from .nn.parallelize import parallelize
from .report import Explanation, Report, explain, report
from .spec import B, P, Placement, S, TensorSpec, sbp
from .tensor import mirror, patches  # noqa: F401  (mirror enters the way from the mirrored view)
from .tensor.autograd import no_sync
from .tensor.create import distribute, from_local
from .tensor.factories import (
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
from .tensor.global_tensor import GlobalTensor
from .tensor.scope import placement_scope
from .tensor.split_matmul import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter

placement = Placement

patches.install()

__all__ = [
    "B",
    "Explanation",
    "GlobalTensor",
    "P",
    "Placement",
    "Report",
    "S",
    "TensorSpec",
    "all_gather_matmul",
    "arange",
    "check_mode",
    "distribute",
    "empty",
    "explain",
    "eye",
    "from_local",
    "full",
    "linspace",
    "logspace",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
    "no_sync",
    "normal",
    "ones",
    "parallelize",
    "placement",
    "placement_scope",
    "rand",
    "randint",
    "randn",
    "randperm",
    "report",
    "sbp",
    "tensor",
    "zeros",
]
