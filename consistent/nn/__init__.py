"""Modules: a plan for a whole module, and the module spread as it says."""

from .master_weights import master_weights
from .parallelize import parallelize, plan_of
from .plan import Border, Layouts, Plan
from .pretrained import from_pretrained

__all__ = [
    "Border",
    "Layouts",
    "Plan",
    "from_pretrained",
    "master_weights",
    "parallelize",
    "plan_of",
]
