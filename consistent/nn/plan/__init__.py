"""Plans of modules: layouts of tensors, and redistribution (boxing) of arguments and results."""

from .layouts import Border, Layouts, Nd, nd_text, read_nd
from .plan import Plan

__all__ = ["Border", "Layouts", "Nd", "Plan", "nd_text", "read_nd"]
