"""Planning of a training step in one process, before the ranks that will run it exist.

``simulate`` estimates time and memory of a step on a machine, ``layouts`` chooses the layouts of
all its tensors, and ``search`` finds the fastest parallel strategy.
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
