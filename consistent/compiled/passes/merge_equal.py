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

from ..agreeing import SUM_WITH_ERRORS
from ..opaque import OpaqueCall
from ..options import CompileOptions
from .trace import Trace, memory_of

# Kinds that are never merged: exchanges and broadcasts that are equal on one rank may differ on
# another, and a sum of ``SUM_WITH_ERRORS`` also exchanges errors of the ops before it.
_NEVER_MERGED = ("exchange", "broadcast", SUM_WITH_ERRORS)


def merge_equal(trace: Trace, _: CompileOptions) -> None:
    """Remove messages that equal an earlier one on the same values, and reuse the earlier result.

    A gather is also removed if its tensors were gathered before, together with others. The bytes
    that are held longer for this are limited by ``trace.keep_bytes``.
    """
    # What a result depends on -> message, its position.
    first_results: dict[tuple, tuple[Node, int]] = {}
    remaining_bytes = trace.keep_bytes
    for node in trace.messages():
        call = trace.call(node)
        if call.kind in _NEVER_MERGED:
            continue
        keys = [_result_key(node, call, i) for i in range(len(call.outs))]
        used_results = trace.results(node)
        earlier_results = {
            i: first_results[keys[i]] for i in used_results if keys[i] in first_results
        }
        size = sum(_result_bytes(call, i) for i in used_results)
        is_mergeable = len(earlier_results) == len(used_results) and all(
            _can_replace(trace, before, j, node, i) for i, (before, j) in earlier_results.items()
        )
        if not is_mergeable or size > remaining_bytes or not used_results:
            first_results.update({key: (node, i) for i, key in enumerate(keys)})
            continue
        remaining_bytes -= size
        for i, item in used_results.items():
            trace.replace(item, _result_node(trace, *earlier_results[i], item))
        trace.remove_message(node, "merge_equal: its result is there already")


def _result_key(node: Node, call: OpaqueCall, i: int) -> tuple:
    inputs = node.args[0]
    if call.gathered:
        return inputs[i], *call.gathered[i]  # type: ignore[index]
    return tuple(inputs), call.number, i  # type: ignore[arg-type]


def _result_node(trace: Trace, message: Node, i: int, like: Any) -> Node:
    results = trace.results(message)
    if i in results:
        return results[i]
    # The first message's result was not used so far, so it has no node yet.
    with trace.graph.inserting_after(message):
        node = trace.graph.call_function(like.target, (message, i))
    node.meta.update(like.meta)
    return node


def _can_replace(trace: Trace, before: Node, j: int, node: Node, i: int) -> bool:
    """Return whether result ``j`` of message ``before`` can replace result ``i`` of ``node``.

    Between the two messages, nothing may modify the inputs of ``node`` or the results.
    """
    input_memories = {memory_of(x) for x in node.all_input_nodes}
    result_memories = {
        memory_of(x) for x in (trace.results(node)[i], trace.results(before).get(j)) if x
    }
    return not trace.is_written(input_memories, before, node) and trace.is_unwritten(
        result_memories
    )


def _result_bytes(call: OpaqueCall, i: int) -> int:
    shape, dtype, _ = call.outs[i]
    return math.prod(shape) * dtype.itemsize
