"""Ops whose local form differs from the op run on the shard.

A form is a function of ``Shards`` found by the name that a signature gives. It works on plain local
tensors and may move data over the axes it serves (``Shards.axes``); torch differentiates it like
any other code. The folders are those of ``rules/``: a form is in the same folder as its row.
"""

from . import families, fused_reduce_scatter, halo, layout, random
from .registry import FORMS, RAISE_FIRST, Shards, form

__all__ = [
    "FORMS",
    "RAISE_FIRST",
    "Shards",
    "families",
    "form",
    "fused_reduce_scatter",
    "halo",
    "layout",
    "random",
]
