"""Random numbers that do not depend on how a tensor is cut."""

from . import draw, dropout, generator

__all__ = ["draw", "dropout", "generator"]
