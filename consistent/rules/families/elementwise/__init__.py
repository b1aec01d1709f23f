"""Rules of ops that work element by element, and of ops that draw or fill elements."""

from . import monotone, pointwise, random, special

__all__ = ["monotone", "pointwise", "random", "special"]
