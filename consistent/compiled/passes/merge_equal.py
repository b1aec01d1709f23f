"""Pass that sends equal messages on the same values only once, and reuses the result.

```
%3 = all_gather(%1)            %3 = all_gather(%1)
%5 = mm(%2, %3)        -->     %5 = mm(%2, %3)
%6 = all_gather(%1)            %7 = mm(%5, %3)
%7 = mm(%5, %6)
```

The first result is kept until its last use. In total, at most ``keep_bytes`` are kept this way, so
a large parameter that is gathered again for backward, to save memory, is still gathered again.
"""

from __future__ import annotations

import math
from typing import Any

from torch.fx import Node

from ..agreeing import KIND
from ..opaque import OpaqueCall
from ..options import CompileOptions
from .trace import Trace, memory_of

# Kinds that are never merged: exchanges and broadcasts that are equal on one rank may differ on
# another, and a sum of ``KIND`` also exchanges errors of the ops before it.
_BY_RANK = ("exchange", "broadcast", KIND)


def merge_equal(trace: Trace, _: CompileOptions) -> None:
    """Remove messages that equal an earlier one on the same values, and reuse the earlier result.

    A gather is also removed if its tensors were gathered before, together with others. The bytes
    that are held longer for this are limited by ``trace.keep_bytes``.
    """
    first: dict[tuple, tuple[Node, int]] = {}  # what a result depends on -> message, its position
    left = trace.keep_bytes
    for node in trace.messages():
        call = trace.call(node)
        if call.kind in _BY_RANK:
            continue
        keys = [_key(node, call, i) for i in range(len(call.outs))]
        used = trace.results(node)
        known = {i: first[keys[i]] for i in used if keys[i] in first}
        size = sum(_size(call, i) for i in used)
        same = len(known) == len(used) and all(
            _is_same(trace, before, j, node, i) for i, (before, j) in known.items()
        )
        if not same or size > left or not used:
            first.update({key: (node, i) for i, key in enumerate(keys)})
            continue
        left -= size
        for i, item in used.items():
            trace.replace(item, _result(trace, *known[i], item))
        trace.leave_out(node, "merge_equal: its result is there already")


def _key(node: Node, call: OpaqueCall, i: int) -> tuple:
    given = node.args[0]
    if call.gathered:
        return given[i], *call.gathered[i]  # type: ignore[index]
    return tuple(given), call.number, i  # type: ignore[arg-type]


def _result(trace: Trace, message: Node, i: int, like: Any) -> Node:
    found = trace.results(message)
    if i in found:
        return found[i]
    # The first message's result was not used so far, so it has no node yet.
    with trace.graph.inserting_after(message):
        made = trace.graph.call_function(like.target, (message, i))
    made.meta.update(like.meta)
    return made


def _is_same(trace: Trace, before: Node, j: int, node: Node, i: int) -> bool:
    """Return whether result ``j`` of message ``before`` can replace result ``i`` of ``node``.

    Nothing may write into the inputs of ``node`` between the two messages, nor into the results.
    """
    given = {memory_of(x) for x in node.all_input_nodes}
    made = {memory_of(x) for x in (trace.results(node)[i], trace.results(before).get(j)) if x}
    return not trace.is_written(given, before, node) and trace.is_own(made)


def _size(call: OpaqueCall, i: int) -> int:
    shape, dtype, _ = call.outs[i]
    return math.prod(shape) * dtype.itemsize
