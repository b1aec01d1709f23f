"""``flow.losses``: the older way to say which loss a job minimises."""

from .optimizer import add_loss

__all__ = ["add_loss"]
