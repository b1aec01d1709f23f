"""Placements, SBPs and specs of tensors: where and how ranks hold a tensor.

They are metadata only, without tensor data or communication.
"""

from . import elsewhere, sbp
from .cut import DimCut, Runs, intersect_runs, item_count, piece
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
    cuts_are_innermost,
    dual,
    dual_nd,
    fits_dtype,
    has_one_partial_kind,
    is_cut,
    partial_of,
    sbp_text,
    without_cuts,
)
from .tensor_spec import (
    Coordinate,
    Layout,
    TensorSpec,
    invalid_cut_reason,
    invalid_dtype_reason,
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
    "invalid_cut_reason",
    "cuts_are_innermost",
    "dual",
    "dual_nd",
    "elsewhere",
    "is_cut",
    "has_one_partial_kind",
    "item_count",
    "fits_dtype",
    "invalid_dtype_reason",
    "intersect_runs",
    "partial_of",
    "piece",
    "sbp_text",
    "without_cuts",
    "resolve_dims",
    "resolve_sbp",
    "sbp",
]
