"""Local forms: implementations of ops whose work on a shard differs from running the op on it.

A signature (a combination of operand and output layouts, see ``rules/``) names the form that it
needs. A form is a function of ``Shards``, the call of an op on this rank. It works on plain local
tensors and may communicate along the placement axes in ``Shards.axes``; torch differentiates it
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
