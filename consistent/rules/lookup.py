"""Ops with an index tensor.

Its dims may be split: each rank looks up its own. The dim that it points into may be split as well:
an index that points outside a rank's shard then reads 0, so that results are P, or writes nothing.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..spec import P, S
from .flat import taken
from .signature import Call, Operand, Signature
from .table import Row, add_rows

READ, WRITE = "read_index", "write_index"


def _tensor(call: Call, name: str) -> Operand:
    found = call.get(name)
    if not isinstance(found, Operand):
        raise TypeError(f"{name} is no tensor")
    return found


def selected(call: Call, parts: int) -> list[Signature]:
    """index_select: one vector of indices along ``dim``."""
    x, index, dim = call.operands[0], _tensor(call, "index"), call.dim("dim")
    made = [call.whole(), call.make({0: P}, P)]
    if x.ndim == 0 or index.ndim != 1:
        return made
    made += [call.make({0: S(d)}, S(d)) for d in range(x.ndim) if d != dim]
    return made + [call.make({index.index: S(0)}, S(dim)), call.make({0: S(dim)}, P, READ)]


def gathered(call: Call, parts: int) -> list[Signature]:
    """gather, and take_along_dim, which broadcasts: an index for each element, along ``dim``."""
    x, index = call.operands[0], _tensor(call, "index")
    made = [call.whole(), call.make({0: P}, P)]
    if call.get("dim") is None:
        return taken(call, parts)
    if x.ndim == 0 or call.get("sparse_grad", False):
        return made
    dim = call.dim("dim")
    out = call.outs[0].shape
    for d in range(x.ndim):
        if d == dim:
            made += [call.make({index.index: S(d)}, S(d)), call.make({0: S(d)}, P, READ)]
        elif out[d] in (x.shape[d], index.shape[d]):
            found = {o.index: S(d) for o in (x, index) if o.shape[d] == out[d]}
            if len(found) == 2 or call.name == "take_along_dim":
                made.append(call.make(found, S(d)))
    return made


def embedded(call: Call, parts: int) -> list[Signature]:
    """embedding: the table split by columns or, with a masked look-up, by rows (the vocabulary)."""
    weight, index = call.args[:2]
    if call.get("sparse", False):
        return [call.whole()]
    made = [call.whole(), call.make({0: P}, P), call.make({0: S(1)}, S(index.ndim))]
    made.append(call.make({0: S(0)}, P, "masked_embedding"))
    # Scaling gradients by frequency counts every index of the batch.
    if not call.get("scale_grad_by_freq", False):
        made += [call.make({1: S(d)}, S(d)) for d in range(index.ndim)]
    return made


def _written(call: Call, source: Operand | None, alike: Iterable[int]) -> list[Signature]:
    """Whole; split along the dims ``alike``; or along ``dim``: each rank writes into its shard."""
    x, index = call.operands[0], _tensor(call, "index")
    dim = call.dim("dim")
    made = [call.whole()]
    for d in alike:
        ins = {0: S(d), **({source.index: S(d)} if source else {})}
        if index.ndim == x.ndim and "src" in call.params:
            ins[index.index] = S(d)
        made.append(call.make(ins, S(d)))
    # A product's gradient divides by what stands in the row that takes the rest.
    if x.ndim and call.get("reduce", None) not in ("prod", "multiply"):
        made.append(call.make({0: S(dim)}, S(dim), WRITE))
    return made


def scattered(call: Call, parts: int) -> list[Signature]:
    """scatter and its kin: an index for each element of ``src``, along ``dim``."""
    x, index = call.operands[0], _tensor(call, "index")
    given = call.get("src", call.kwargs.get("value"))
    source = given if isinstance(given, Operand) else None
    if x.ndim == 0 or (source is not None and source.ndim != x.ndim):
        return [call.whole()]
    dim = call.dim("dim")
    sizes = [o.shape for o in (x, index, source) if o is not None]
    alike = [d for d in range(x.ndim) if d != dim and len({s[d] for s in sizes}) == 1]
    made = _written(call, source, alike)
    if call.name == "scatter_add" and source is not None:
        made += _added(
            call, index, source, S(dim) if index.shape[dim] == source.shape[dim] else None, dim
        )
    return made


def _added(call: Call, index: Operand, source: Operand, cut: object, dim: int) -> list[Signature]:
    """Sums: P in x and source together, or each rank adds its share of the entries."""
    made = [call.make({0: P, source.index: P}, P)]
    if cut is not None:
        own = S(dim) if index.ndim > 1 else S(0)
        made.append(call.make({0: P, index.index: own, source.index: S(dim)}, P))
    return made


def indexed(call: Call, parts: int) -> list[Signature]:
    """index_add, index_copy, index_fill, index_reduce: a vector of places along ``dim``."""
    x, index, dim = call.operands[0], _tensor(call, "index"), call.dim("dim")
    given = call.get("source")
    source = given if isinstance(given, Operand) else None
    if x.ndim == 0 or index.ndim != 1 or (source is not None and source.ndim not in (0, x.ndim)):
        return [call.whole()]
    if source is not None and source.ndim == 0 and call.name != "index_fill":
        return [call.whole()]
    cut = source if source is not None and source.ndim else None
    made = _written(call, cut, [d for d in range(x.ndim) if d != dim])
    if call.name == "index_add" and source is not None:
        made += [
            call.make({0: P, source.index: P}, P),
            call.make({0: P, index.index: S(0), source.index: S(dim)}, P),
        ]
    return made


def one_hot(call: Call, parts: int) -> list[Signature]:
    """one_hot with its number of classes given."""
    (x,) = call.operands
    if call.get("num_classes", -1) < 0:
        return [call.whole()]
    return call.same(range(x.ndim))


ROWS = (
    Row("embedding", embedded, "weight indices padding_idx scale_grad_by_freq sparse"),
    Row("gather", gathered, "input dim index sparse_grad"),
    Row("index_add", indexed, "input dim index source alpha reduce"),
    Row("index_copy", indexed, "input dim index source reduce"),
    Row("index_fill", indexed, "input dim index source reduce"),
    Row("index_reduce", indexed, "input dim index source reduce"),
    Row("index_select", selected, "input dim index"),
    Row("one_hot", one_hot, "input num_classes"),
    Row("scatter scatter_add scatter_reduce", scattered, "input dim index src reduce"),
    Row("take_along_dim", gathered, "input index dim sparse_grad"),
)  # fmt: skip

add_rows(ROWS)
