"""Distribute modules over ranks: ``parallelize`` lays out a whole module as a ``Plan`` says."""

from typing import TYPE_CHECKING, Any

from ..spec.elsewhere import PART_HINTS, module_getattr
from .moving import move
from .owned.matrix_step import matrix_step
from .parallelize import parallelize, plan_of
from .plan import Border, Layouts, Plan
from .pretrained import from_pretrained
from .sharded.master_weights import master_weights

# Defined in packages that build on this one; the top-level ``__init__`` sets them.
Graph: Any
"""``consistent.step.Graph``: a step of a program as one object."""
graph: Any
"""``consistent.step``: the module of ``Graph``, with ``GraphModule`` and ``GraphConfig``."""
pipeline: Any
"""``consistent.pipeline.pipeline``: cuts an ordinary module into pipeline stages."""

__all__ = [
    "Border",
    "Graph",
    "Layouts",
    "Plan",
    "from_pretrained",
    "graph",
    "master_weights",
    "matrix_step",
    "move",
    "parallelize",
    "pipeline",
    "plan_of",
]

if not TYPE_CHECKING:
    __getattr__ = module_getattr(__name__, PART_HINTS, __all__)
