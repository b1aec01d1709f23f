"""Placements, SBPs and specs of tensors: where and how ranks hold a tensor.

They are metadata only, without tensor data or communication.
"""

from . import elsewhere, sbp
from .cut import DimCut, Runs, items_in, overlapping, piece
from .placement import Placement, World, check_placement
from .sbp import (
    EXTREMES,
    B,
    NdSbp,
    P,
    Partial,
    S,
    Sbp,
    SbpLike,
    Split,
    as_nd_sbp,
    as_sbp,
    cuts_last,
    dual,
    dual_nd,
    is_cut,
    is_one_way,
    may_be,
    partial_of,
    plain_nd,
)
from .tensor_spec import (
    Coordinate,
    Layout,
    TensorSpec,
    cut_fault,
    misfit,
    resolve_dims,
    resolve_sbp,
)

__all__ = [
    "B",
    "Coordinate",
    "DimCut",
    "EXTREMES",
    "Layout",
    "NdSbp",
    "P",
    "Partial",
    "Placement",
    "S",
    "Runs",
    "Sbp",
    "SbpLike",
    "Split",
    "TensorSpec",
    "World",
    "as_nd_sbp",
    "as_sbp",
    "check_placement",
    "cut_fault",
    "cuts_last",
    "dual",
    "dual_nd",
    "elsewhere",
    "is_cut",
    "is_one_way",
    "items_in",
    "may_be",
    "misfit",
    "overlapping",
    "partial_of",
    "piece",
    "plain_nd",
    "resolve_dims",
    "resolve_sbp",
    "sbp",
]
