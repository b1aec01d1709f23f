"""Answers before a rank is rented: what a step takes on a machine (simulate), which layouts it
should have (layouts), and which strategy is the fastest (search)."""

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
