"""Pass that adds two partial tensors before one all-reduce, instead of adding the results of two
all-reduces.

```
%3 = all_reduce(%1)
%4 = all_reduce(%2)     -->    %5 = add(%1, %2)
%5 = add(%3, %4)               %6 = all_reduce(%5)
```
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..opaque import MESSAGE
from ..options import CompileOptions
from .trace import Trace, memory_of

_ADDS = (torch.ops.aten.add.Tensor,)


def reassociate_all_reduce(trace: Trace, _: CompileOptions) -> None:
    """Replace a + b, where both are results of all-reduces, by one all-reduce of a local sum.

    This is repeated until no such pair is left. Neither result may have another reader.
    """
    changed = True
    while changed:
        changed = any(_reassociate_at(trace, node) for node in list(trace.graph.nodes))


def _reassociate_at(trace: Trace, node: Node) -> bool:
    if node.target not in _ADDS or len(node.args) != 2 or node.kwargs:
        return False
    if trace.lasting.intersection(node.all_input_nodes):
        return False
    sums = [_sum_of(trace, x) for x in node.args]
    a, b = sums
    if a is None or b is None or a is b or trace.call(a) != trace.call(b):
        return False
    if a.meta.get("dtype") != b.meta.get("dtype"):
        return False
    (x,), (y,) = a.args[0], b.args[0]  # type: ignore[misc]
    if any(trace.is_written({memory_of(v)}, message, node) for v, message in ((x, a), (y, b))):
        return False
    call = trace.call(a)
    with trace.graph.inserting_before(node):
        local_sum = trace.graph.call_function(node.target, (x, y))
        message = trace.graph.call_function(MESSAGE, ([local_sum], call.number))
        total = trace.graph.node_copy(next(iter(a.users)), {a: message}.__getitem__)
    # The local sum has a memory of its own; the total takes over that of ``node``.
    local_sum.meta.update(node.meta, memory=object())
    message.meta.update(a.meta)
    total.meta.update(node.meta)
    trace.replace(node, total)
    trace.graph.erase_node(node)
    trace.remove_message(a, "reassociate_all_reduce: it is added to another sum, which is sent")
    for item in list(b.users):
        trace.graph.erase_node(item)
    trace.graph.erase_node(b)
    return True


def _sum_of(trace: Trace, x: Any) -> Node | None:
    """Return the message whose only result is ``x``, if it is a sum over ranks; else None."""
    if not isinstance(x, Node) or len(x.users) != 1 or x.op != "call_function":
        return None
    message = x.args[0] if x.args else None
    if not isinstance(message, Node) or message.target is not MESSAGE or len(message.users) != 1:
        return None
    return message if trace.call(message).is_sum else None
