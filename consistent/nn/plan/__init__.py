"""Plans of modules: the layouts of each tensor, and the boxing at the borders of modules."""

from .layouts import Border, Layouts, Nd, nd_text, read_nd
from .plan import Plan

__all__ = ["Border", "Layouts", "Nd", "Plan", "nd_text", "read_nd"]
