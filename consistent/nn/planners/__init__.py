"""Planners: functions that choose a module's layouts along one placement axis, such as "zero3"."""

from .registry import PLANNERS, axis_names, plan_for

__all__ = ["PLANNERS", "axis_names", "plan_for"]
