"""``flow.distribute``: older names of SBPs and views."""

from __future__ import annotations

from ..spec import B, S, Sbp
from .scope import View, consistent_view, mirrored_view


def split(axis: int) -> Sbp:
    """Return ``S(axis)``.

    The weight of a dense layer is stored as (out, in), so ``split(axis=0)`` cuts its columns.
    """
    return S(axis)


def broadcast() -> Sbp:
    """Return ``B``."""
    return B


def mirrored_strategy() -> View:
    """Return ``scope.mirrored_view()``."""
    return mirrored_view()


def consistent_strategy() -> View:
    """Return ``scope.consistent_view()``."""
    return consistent_view()
