"""distribute: the older names of SBPs and views."""

from __future__ import annotations

from ..spec import B, S, Sbp
from .scope import View, consistent_view, mirrored_view


def split(axis: int) -> Sbp:
    """``S(axis)``. A dense layer's weight is stored (out, in): ``split(axis=0)`` cuts columns."""
    return S(axis)


def broadcast() -> Sbp:
    """``B``."""
    return B


def mirrored_strategy() -> View:
    """``scope.mirrored_view()``."""
    return mirrored_view()


def consistent_strategy() -> View:
    """``scope.consistent_view()``."""
    return consistent_view()
