"""A strategy's name -> how it lays out a module along one axis of a placement."""

from .registry import PLANNERS, axis_names, plan_for

__all__ = ["PLANNERS", "axis_names", "plan_for"]
