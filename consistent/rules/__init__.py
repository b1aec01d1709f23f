"""Rules: for each op, which layouts its operands may have and which layouts its outputs then have.

Read `signature.py` (one correct combination of SBPs of an op's operands and outputs), `notation/`
(rules written as mathematics), `table.py` (op name -> row, which holds the rule), then the rows in
`families/` and `layout/`; `halo/` says which neighbouring elements a rank needs. `candidates.py`
and `choose.py` pick a signature for a call.
"""

from . import families, halo, layout
from .signature import Call, DoesNotFit, Operand, Out, Signature
from .table import ROWS, Row, find_row

__all__ = [
    "ROWS",
    "Call",
    "DoesNotFit",
    "Operand",
    "Out",
    "Row",
    "Signature",
    "families",
    "find_row",
    "halo",
    "layout",
]
