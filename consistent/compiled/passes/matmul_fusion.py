"""Pattern matching of matmuls next to the boxing of their operand or result; the two can run
overlapped, in chunks.

```
%4 = mm(%0, %1)                 %3 = all_gather(%0)
%5 = all_reduce(%4)             %4 = mm(%3, %1)
```

Views may be between the two, because ``mm`` and ``addmm`` have only 2-D operands. The boxing must
be a single move, that is, one message.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch.fx import Node

from ...boxing.plan import plan
from ...boxing.steps import Move
from ...movement.world import my_coordinate
from ...overlap.chunked_matmul import MAX_CHUNKS, Boxing
from ...spec import B, P, Split, TensorSpec
from ..opaque import OpaqueCall
from .epilogue_fusion import is_before, nodes_until_next_message
from .trace import Trace, memory_of

_aten = torch.ops.aten
_VIEWS = (_aten.view.default, _aten._unsafe_view.default)
_PRODUCTS = (_aten.mm.default, _aten.addmm.default)


@dataclass(frozen=True)
class Product:
    """A match: a matmul that can be fused with the boxing next to it.

    Args:
        src, dst: specs before and after the boxing.
        name: names of the two ops, in order.
        operands: nodes of x, w, and the bias if the matmul is an addmm.
        lead: all sizes but the last of the boxed tensor's shape on this rank.
        node: node of the matmul.
        nodes: nodes of the matmul, and of the views between it and the message.
        is_first: whether the matmul is before the message, whose input it is; otherwise it reads
            the result of the message.
    """

    src: TensorSpec
    dst: TensorSpec
    name: str
    operands: list[Node]
    lead: tuple[int, ...]
    node: Node
    nodes: set[Node]
    is_first: bool


def match_product(trace: Trace, message: Node, written: set[Any]) -> Product | None:
    """Return the matmul that can be fused with ``message``, which boxes one tensor in one move.

    Return None if there is none, or if it cannot be split into chunks. ``written`` has the
    ``memory_of`` of all values into which ops write.
    """
    specs, items = message.meta.get("boxing"), list(message.users)
    if specs is None or len(items) != 1 or memory_of(items[0]) in written:
        return None
    src, dst = specs
    moves = plan(src, dst) if src.placement == dst.placement else ()
    if len(moves) != 1 or not isinstance(moves[0], Move) or not _can_overlap(src, dst):
        return None
    move, call = moves[0], trace.call(message)
    kind = call.kind
    if not _is_move(call, move, src):
        return None
    if move.src is P and kind in ("all_reduce", "reduce_scatter"):
        return _match_product_before(trace, message, src, dst, written)
    if isinstance(move.src, Split) and move.dst is B and kind == "all_gather_into_tensor":
        return _match_product_after(trace, message, items[0], src, dst)
    return None


def _is_move(call: OpaqueCall, move: Move, src: TensorSpec) -> bool:
    """Return whether the message implements ``move``, the only step of a boxing from ``src``."""
    coordinate, split = my_coordinate(src.placement), move.dst if move.dst is not B else move.src
    if coordinate is None or call.ranks != tuple(src.placement.axis_ranks(move.axis, coordinate)):
        return False
    dim = call.run.arguments.get("dim")  # type: ignore[attr-defined]
    return dim is None or (isinstance(split, Split) and split.dim == dim % src.ndim)


def _can_overlap(src: TensorSpec, dst: TensorSpec) -> bool:
    if my_coordinate(src.placement) is None or src.ndim < 2 or not src.dtype.is_floating_point:
        return False
    if src.layout.is_cut or dst.layout.is_cut:  # the boxing also reorders items
        return False
    return Boxing(src, dst, MAX_CHUNKS).overlaps()


def _match_product_before(
    trace: Trace, message: Node, src: TensorSpec, dst: TensorSpec, written: set[Any]
) -> Product | None:
    """Return the matmul whose result ``message`` sends, if nothing else reads it.

    ``src`` and ``dst`` are the specs before and after the boxing. None: there is no such product.
    """
    node: Any
    (node,) = trace.inputs(message)
    shape = node.meta.get("shape")
    reader, inside = message, set[Node]()
    while True:
        # The fused call does not return the partial sum, so nothing else may read it.
        is_only_reader = list(node.users) == [reader] and node not in trace.lasting
        if not is_only_reader or memory_of(node) in written:
            return None
        inside.add(node)
        if node.target not in _VIEWS:
            break
        reader, node = node, node.args[0]
    operands = _operands(node)
    if operands is None or shape != src.local_shape(my_coordinate(src.placement)):
        return None
    columns = operands[1].meta["shape"][1]
    if shape[-1] != columns or not _is_unwritten(trace, operands, node, message):
        return None
    name = f"{_product_name(node)}, {trace.call(message).kind}"
    return Product(src, dst, name, operands, shape[:-1], node, inside, True)


def _match_product_after(
    trace: Trace, message: Node, item: Node, src: TensorSpec, dst: TensorSpec
) -> Product | None:
    """Return the first matmul that reads the gathered tensor ``item``, if it can be fused.

    ``src`` and ``dst`` are the specs before and after the boxing. None: there is no such product.
    """
    (x,) = trace.inputs(message)
    shape = item.meta["shape"]
    if shape != dst.local_shape(my_coordinate(dst.placement)):
        return None
    following = set(nodes_until_next_message(trace, message))
    flat_shape = [prod(shape[:-1]), shape[-1]]
    views = [v for v in item.users if v.target in _VIEWS and list(v.args[1]) == flat_shape]  # type: ignore
    for source in (item, *views):
        for node in source.users:
            operands = _operands(node)
            if operands is None or operands[0] is not source or node not in following:
                continue
            if source.meta["shape"] != tuple(flat_shape) or source in operands[1:]:
                continue
            other_operands = operands[1:]
            if not all(is_before(y, message) for y in other_operands):
                continue
            if _is_unwritten(trace, other_operands, message, node) and node.meta.get("contiguous"):
                name = f"all_gather, {_product_name(node)}"
                return Product(
                    src, dst, name, [x, *other_operands], shape[:-1], node, {node}, False
                )
    return None


def _operands(node: Any) -> list[Node] | None:
    """Return the nodes [x, w] or [x, w, bias] of a matmul (``mm`` or ``addmm``).

    Return None if ``node`` is no such matmul, or one that cannot be fused: a bias must have one
    number for each column, and all must have one dtype.
    """
    if not isinstance(node, Node) or node.target not in _PRODUCTS or node.kwargs:
        return None
    args: list[Any] = list(node.args)
    if not all(isinstance(y, Node) for y in args):
        return None
    *bias, x, w = args
    if bias and bias[0].meta.get("shape") != (w.meta["shape"][1],):
        return None
    return [x, w, *bias] if len({y.meta["dtype"] for y in args}) == 1 else None


def _product_name(node: Node) -> str:
    return "mm" if node.target is _aten.mm.default else "addmm"


def _is_unwritten(trace: Trace, inputs: list[Node], first: Node, last: Node) -> bool:
    """Return whether ``inputs`` are not modified between the nodes ``first`` and ``last``.

    The fused call may then read them at either position.
    """
    return not trace.is_written({memory_of(x) for x in inputs}, first, last)
