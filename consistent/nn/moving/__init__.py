"""move: a training job that goes on, on other ranks or under another plan."""

from .move import move

__all__ = ["move"]
