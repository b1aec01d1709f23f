"""Rules: which SBPs an op accepts and which come out, one row per op.

Read `signature.py` (one correct combination of SBPs of an op's operands and outputs), `notation/`
(rules as mathematics), `table.py` (op name -> row), then the rows in `families/` and `layout/`;
`halo/` says which neighbours a rank needs. `candidates.py` and `choose.py` pick a signature for a
call.
"""

from . import families, halo, layout
from .signature import Call, DoesNotFit, Operand, Out, Signature
from .table import ROWS, Row, find

__all__ = [
    "ROWS",
    "Call",
    "DoesNotFit",
    "Operand",
    "Out",
    "Row",
    "Signature",
    "families",
    "find",
    "halo",
    "layout",
]
