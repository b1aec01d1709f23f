"""Modules: a plan for a whole module, and the module spread as it says."""

from typing import Any

from .master_weights import master_weights
from .parallelize import parallelize, plan_of
from .plan import Border, Layouts, Plan
from .pretrained import from_pretrained

# Of floors above; the top of the package sets them.
Graph: Any
graph: Any
pipeline: Any

__all__ = [
    "Border",
    "Graph",
    "Layouts",
    "Plan",
    "from_pretrained",
    "graph",
    "master_weights",
    "parallelize",
    "pipeline",
    "plan_of",
]
