"""``flow.losses``: the older way to say what a job minimises."""

from .optimizer import add_loss

__all__ = ["add_loss"]
