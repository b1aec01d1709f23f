"""Rules of ops with an index tensor, such as gather, scatter, index_add and embedding.

The dims of the index may be split: each rank looks up its own indices. The dim that they point into
may be split as well: an index that points outside a rank's shard then reads 0, so that results are
P, or writes nothing.

In the rules D is the dim that an index points into, and E the dim of the indices, which takes its
place in the result.
"""

from __future__ import annotations

import math

from ....spec import S
from ... import notation
from ...signature import Call, DoesNotFit, Signature
from ...table import Row, add_rows
from .flat_index import take

READ_INDEX, WRITE_INDEX = "read_index", "write_index"

_GATHER = "...D, f(index:...E) -> ...E; D by read_index"


def take_along_dim(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of take_along_dim, by the rule of gather.

    So any dim of the index may be split, and the dim D that it points into as well. A call without
    a dim has the signatures of take.
    """
    if call.get("dim") is None:
        return take(call, parts)
    x, index = call.operands[0], call.get("index")
    dim = call.dim()
    if x.shape[dim] == 1 != index.shape[dim]:
        raise DoesNotFit("torch broadcasts the one item of the dim before it looks anything up")
    return notation.signatures_of([notation.parse(_GATHER)], call, parts)


# To scale gradients by frequency, every index of the batch must be counted, so indices stay whole.
_BY_COUNT = "ve, f([...]) -> [...]e; v by masked_embedding; unless sparse"
_EMBEDDING = "ve, f(...) -> ...e; v by masked_embedding"
# Not masked: a mask would give entries for rows that are not looked up.
_SPARSE = "[v]e, f(...) -> ...e"


def embedding(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of embedding, by `ve, f(...) -> ...e` (v rows of e columns).

    If the table is split by rows and the indices are split too, each rank fetches the rows that it
    looks up from the ranks that have them, each row once: ``S(0), S(d) -> S(d)``.
    """
    by_count = call.get("scale_grad_by_freq", False)
    rule = _BY_COUNT if by_count else _SPARSE if call.get("sparse", False) else _EMBEDDING
    signatures = notation.signatures_of([notation.parse(rule)], call, parts)
    if by_count:
        return signatures
    table, index = call.operands
    rows = min(-(-math.prod(index.shape) // parts), table.shape[0])
    row_nbytes = table.shape[1] * table.spec.dtype.itemsize + index.spec.dtype.itemsize
    nbytes = rows * row_nbytes * (parts - 1) // parts
    if not index.spec.sbp[call.axis].is_split:
        # A program that has whole indices will need whole rows, so the result would be gathered.
        out = call.outs[0]
        nbytes += out.shape.numel() * out.dtype.itemsize * (parts - 1) // parts
    fetched_signatures = [
        call.new_signature({0: S(0), 1: S(d)}, S(d), "rows_of_owners", nbytes)
        for d in range(index.ndim)
    ]
    return [*signatures, *fetched_signatures]


_DIM = "input dim index"
_SCATTER = "f(...D, index:...[E], src:...[E]) -> ...D; D by write_index; sizes may differ"
_INDEX_WRITE = "f(...D, index:[E], source:...[E]) -> ...D; D by write_index"

ROWS = (
    Row(
        "embedding",
        embedding,
        "weight indices padding_idx scale_grad_by_freq sparse",
        any_size=True,  # only the bytes that "rows_of_owners" sends depend on sizes
    ),
    Row("gather", f"{_GATHER}; sizes may differ; unless sparse_grad", f"{_DIM} sparse_grad"),
    Row("index_add", "...D + f(index:E), source:...E -> ...D; D by write_index", f"{_DIM} source"),
    Row("index_copy", _INDEX_WRITE, f"{_DIM} source"),
    Row("index_fill", "f(...D, index:[E], value:) -> ...D; D by write_index", f"{_DIM} value"),
    Row(
        "index_reduce",
        # Not by write_index for products: their gradient would divide by its spare row of zeros.
        (f"{_INDEX_WRITE}; unless reduce is prod", "f(...[D], index:[E], source:...[E]) -> ...[D]"),
        f"{_DIM} source reduce",
    ),
    Row("index_select", "...D, f(index:E) -> ...E; D by read_index", _DIM),
    Row("one_hot", "f(...) -> ...[c]; by one_hot", "input num_classes=-1"),
    Row(
        "scatter",
        (f"{_SCATTER}; unless reduce is multiply",
         "f(...[D], index:...[E], src:...[E]) -> ...[D]; sizes may differ"),
        f"{_DIM} src reduce",
    ),
    Row(
        "scatter_add",
        "...D + f(index:...E), src:...E -> ...D; D by write_index; sizes may differ",
        f"{_DIM} src",
    ),
    Row(
        "scatter_reduce",
        (f"{_SCATTER}; unless reduce is prod",
         "f(...[D], index:...[E], src:...[E]) -> ...[D]; sizes may differ"),
        f"{_DIM} src reduce",
    ),
    Row("take_along_dim", take_along_dim, "input index dim sparse_grad"),
)  # fmt: skip

add_rows(ROWS)
