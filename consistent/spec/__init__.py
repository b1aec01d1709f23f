"""The words: placement, sbp and the spec of a tensor. No tensor data, no communication."""

from . import sbp
from .placement import Placement
from .sbp import B, NdSbp, P, S, Sbp, SbpLike, Split, as_nd_sbp, dual, dual_nd
from .tensor_spec import Coordinate, TensorSpec, piece, resolve_sbp

__all__ = [
    "B",
    "Coordinate",
    "NdSbp",
    "P",
    "Placement",
    "S",
    "Sbp",
    "SbpLike",
    "Split",
    "TensorSpec",
    "as_nd_sbp",
    "dual",
    "dual_nd",
    "piece",
    "resolve_sbp",
    "sbp",
]
