"""Local forms: ops whose work on a shard differs from running the op itself on the shard.

A form is a function of ``Shards``, looked up by the name that a signature gives. It works on plain
local tensors and may move data over the axes it serves (``Shards.axes``); torch differentiates it
like any other code. The folders have the names of the folders of ``rules/``: a form is in the
folder of the rule that names it.
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
