"""``flow.distribute``: older names of the layouts ``S(axis)`` and ``B``, and of the two views."""

from __future__ import annotations

from ..spec import B, S, Sbp
from .scope import View, consistent_view, mirrored_view


def split(axis: int) -> Sbp:
    """Return the layout ``S(axis)``, which splits a tensor along ``axis``.

    The weight of a dense layer is stored as (out, in), so ``split(axis=0)`` splits its output
    features.
    """
    return S(axis)


def broadcast() -> Sbp:
    """Return the layout ``B``, which replicates a tensor."""
    return B


def mirrored_strategy() -> View:
    """Return ``scope.mirrored_view()``, of which this is the older name."""
    return mirrored_view()


def consistent_strategy() -> View:
    """Return ``scope.consistent_view()``, of which this is the older name."""
    return consistent_view()
