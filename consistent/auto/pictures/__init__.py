"""Pictures of plans: memory by rank, a step's timeline, and the costs of a search's choices."""

from .costs import CostsPicture
from .memory import MemoryPicture
from .step import StepPicture

__all__ = ["CostsPicture", "MemoryPicture", "StepPicture"]
