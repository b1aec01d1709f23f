"""Which SBPs an op accepts and what comes out: one row an op, families in files of their own."""

from . import (
    attention,
    conv,
    elementwise,
    fft,
    index,
    join,
    linalg,
    lookup,
    loss,
    matrices,
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
    "fft",
    "find",
    "index",
    "join",
    "linalg",
    "lookup",
    "loss",
    "matrices",
    "norm",
    "random",
    "recurrent",
    "reduce",
    "shape",
    "view",
]
