"""Pictures of what was planned: memory by rank, a step's timeline, costs of what a search tried."""

from .costs import CostsPicture
from .memory import MemoryPicture
from .step import StepPicture

__all__ = ["CostsPicture", "MemoryPicture", "StepPicture"]
