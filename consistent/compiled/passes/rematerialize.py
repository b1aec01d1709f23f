"""Recomputation of cheap values for backward, instead of holding them (selective activation
checkpointing on the recorded graph).

```
%3 = gelu(%2)                      %3 = gelu(%2)
%4 = mm(%3, %1)            -->     %4 = mm(%3, %1)
...                                ...                  %3 is not held here
%8 = mm(t(%3), %7)                 %9 = gelu(%2)        %2 is held anyway
                                   %8 = mm(t(%9), %7)
```

Cheap ops are elementwise ops, views, reductions along rows, and this library's random ops, which
draw the same numbers again. Products, messages and torch's own random ops are not repeated.
Recomputed values are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..listing import is_item
from ..opaque import DRAWN
from .peak import Count
from .rematerialization import Rematerialization
from .trace import Trace

_NAMED = frozenset(
    "clone _to_copy expand full full_like ones_like zeros_like new_zeros scalar_tensor arange sum "
    "mean amax amin var _softmax _log_softmax native_layer_norm _fused_rms_norm embedding cat "
    "stack _unsafe_view repeat constant_pad_nd tril triu".split()
)

_TRIES = 16  # the search for a value stops after this many that do not lower memory


def is_cheap(node: Node) -> bool:
    """Return whether an op may run twice: it computes the same values again, and takes little time.

    Examples are elementwise ops and views; matrix products and messages are not cheap.
    """
    op: Any = node.target
    if op is DRAWN or is_item(node):
        return True
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    named = op._schema.name.partition("::")[2] in _NAMED
    return named or op.is_view or torch.Tag.pointwise in op.tags


def rematerialize(trace: Trace, most: int) -> int:
    """Recompute values until at most ``most`` bytes are held at a time, or until no value helps.

    Return the number of values that are recomputed.
    """
    again, count = 0, Count(trace)
    least = count.bytes
    more: list[Rematerialization] = []  # changes since the peak was last lowered
    while count.bytes > most:
        found = _one(trace, count)
        if found is None:
            break
        made, count = found
        more.append(made)
        if count.bytes < least:
            again, least, more = again + len(more), count.bytes, []
    for made in reversed(more):  # these did not lower the peak: as much is held elsewhere
        made.undo()
    return again


def _one(trace: Trace, count: Count) -> tuple[Rematerialization, Count] | None:
    """Recompute one value for its readers after the peak: the largest for which that helps.

    It helps if the peak does not rise and less is held at the node of the old peak. Return the
    change of the graph and its new ``Count``; None if no value helps.
    """
    peak = count.peak
    if peak >= len(count.nodes):
        return None
    here = count.bytes_at(peak)
    left = _TRIES
    for memory in waiting(count):
        tried = Rematerialization(trace, count, memory, lambda n: count.at[n] > peak, is_cheap)
        if not tried.is_done:
            continue
        after = Count(trace)
        if after.bytes <= count.bytes and after.bytes_at(after.at[count.nodes[peak]]) < here:
            return tried, after
        tried.undo()
        left -= 1
        if left == 0:
            break
    return None


def waiting(count: Count) -> list[Any]:
    """Return the values (as ``memory_of``) held at the peak only to be read later, largest first.

    They are computed before the peak and read after it, and the op at the peak does not use them,
    so recomputing them for the later readers can lower the peak.
    """
    peak = count.peak
    used = {n.meta.get("memory") for n in count.nodes[peak].all_input_nodes}
    used.add(count.nodes[peak].meta.get("memory"))
    found = [
        (-held.bytes, held.first, memory)
        for memory, held in count.memories.items()
        if held.first < peak < held.last and held.bytes and memory not in used
    ]
    return [memory for _, _, memory in sorted(found, key=lambda one: one[:2])]
