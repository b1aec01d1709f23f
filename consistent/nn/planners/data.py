"""data: every rank has all of the module; gradients are summed over the ranks."""

from __future__ import annotations

from ..plan import Plan
from .asked import Asked


def plan_data(asked: Asked) -> Plan:
    """All B, which is what a plan that says nothing means."""
    return Plan()
