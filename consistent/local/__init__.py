"""Ops whose local form differs from the op run on the shard.

A form is a function of ``Shards`` found by the name that a signature gives. It works on plain local
tensors and may move data over the axes it serves (``Shards.axes``); torch differentiates it like
any other code.
"""

from . import (
    after_sum,
    attention,
    bags,
    count,
    counted,
    ctc,
    cumulative,
    dropout,
    embedding,
    flat,
    index,
    join,
    loss,
    norm,
    planes,
    random,
    reduce,
    runs,
    select,
    shape,
    sort,
    window,
)
from .forms import FORMS, Shards, form

__all__ = [
    "FORMS",
    "Shards",
    "after_sum",
    "attention",
    "bags",
    "count",
    "counted",
    "ctc",
    "cumulative",
    "dropout",
    "flat",
    "embedding",
    "form",
    "index",
    "join",
    "loss",
    "norm",
    "planes",
    "random",
    "reduce",
    "runs",
    "select",
    "shape",
    "sort",
    "window",
]
