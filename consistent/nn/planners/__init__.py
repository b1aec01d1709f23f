"""Planners: functions that lay out a module along one axis, by the names of their strategies."""

from .registry import PLANNERS, axis_names, plan_for

__all__ = ["PLANNERS", "axis_names", "plan_for"]
