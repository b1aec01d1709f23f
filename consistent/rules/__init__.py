"""Which SBPs an op accepts and what comes out: one row an op, families in files of their own."""

from . import (
    attention,
    conv,
    elementwise,
    index,
    join,
    linalg,
    lookup,
    loss,
    norm,
    random,
    recurrent,
    reduce,
    shape,
    view,
)
from .signature import Call, Operand, Out, Signature
from .table import ROWS, Row, find

__all__ = [
    "ROWS",
    "Call",
    "Operand",
    "Out",
    "Row",
    "Signature",
    "attention",
    "conv",
    "elementwise",
    "find",
    "index",
    "join",
    "linalg",
    "lookup",
    "loss",
    "norm",
    "random",
    "recurrent",
    "reduce",
    "shape",
    "view",
]
