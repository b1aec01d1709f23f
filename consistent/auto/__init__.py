"""Planning of a step before any rank is rented.

``simulate`` tells what a step takes on a machine, ``layouts`` chooses its layouts, and ``search``
finds the fastest strategy.
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
