"""Move a running training job to other ranks or to another plan (``move``)."""

from .move import move

__all__ = ["move"]
