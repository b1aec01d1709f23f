"""What is decided for a module: how each tensor lies, and what is boxed at a module's border."""

from .layouts import Border, Layouts, Nd, nd_text, read_nd
from .plan import Plan

__all__ = ["Border", "Layouts", "Nd", "Plan", "nd_text", "read_nd"]
