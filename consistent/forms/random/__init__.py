"""Forms of random ops whose numbers do not depend on the layout of a tensor."""

from . import draw, dropout, generator

__all__ = ["draw", "dropout", "generator"]
