"""Placement, SBP and the spec of a tensor. No tensor data, no communication."""

from . import elsewhere, sbp
from .placement import Placement, World, check_placement, use_world
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
    dual,
    dual_nd,
    is_one_way,
    may_be,
    partial_of,
)
from .tensor_spec import Coordinate, Layout, TensorSpec, misfit, piece, resolve_sbp

__all__ = [
    "B",
    "Coordinate",
    "EXTREMES",
    "Layout",
    "NdSbp",
    "P",
    "Partial",
    "Placement",
    "S",
    "Sbp",
    "SbpLike",
    "Split",
    "TensorSpec",
    "World",
    "as_nd_sbp",
    "as_sbp",
    "check_placement",
    "dual",
    "dual_nd",
    "elsewhere",
    "is_one_way",
    "may_be",
    "misfit",
    "partial_of",
    "piece",
    "resolve_sbp",
    "sbp",
    "use_world",
]
