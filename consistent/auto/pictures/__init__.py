"""Charts of simulations and searches: memory by rank, timeline of a step, and costs of the choices
that a search tried."""

from .costs import CostsPicture
from .memory import MemoryPicture
from .step import StepPicture

__all__ = ["CostsPicture", "MemoryPicture", "StepPicture"]
