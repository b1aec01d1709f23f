"""Planning of a training step in one process, before the ranks that will run it exist.

``simulate`` estimates time and memory of a step on a machine, and ``search`` finds the fastest
parallel strategy. ``plan="auto"`` of ``parallelize`` is in ``nn/planners/layout_search``.
"""

from .machines import Machine, Wire
from .machines.find import machine
from .simulation.report import SimulatedStep
from .simulation.simulate import Simulation, simulate
from .strategies import Found, Strategy, Tried, search

__all__ = [
    "Found",
    "Machine",
    "SimulatedStep",
    "Simulation",
    "Strategy",
    "Tried",
    "Wire",
    "machine",
    "search",
    "simulate",
]
