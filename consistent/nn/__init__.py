"""Modules: a plan for a whole module, and the module spread as it says."""

from .parallelize import parallelize, plan_of
from .plan import Border, Layouts, Plan

__all__ = ["Border", "Layouts", "Plan", "parallelize", "plan_of"]
