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
draw the same numbers again. Matmuls, messages and torch's own random ops are not repeated.
Recomputed values are bitwise equal.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.fx import Node

from ..listing import is_item
from ..opaque import DRAWN
from .peak import MemoryUse
from .rematerialization import Rematerialization
from .trace import Trace

_CHEAP_OPS = frozenset(
    "clone _to_copy expand full full_like ones_like zeros_like new_zeros scalar_tensor arange sum "
    "mean amax amin var _softmax _log_softmax native_layer_norm _fused_rms_norm embedding cat "
    "stack _unsafe_view repeat constant_pad_nd tril triu".split()
)

_TRIES = 16  # the search for a value stops after this many that do not lower memory


def is_cheap(node: Node) -> bool:
    """Return whether an op may run twice: it computes the same values again, and takes little time.

    Examples are elementwise ops and views; matmuls and messages are not cheap.
    """
    op: Any = node.target
    if op is DRAWN or is_item(node):
        return True
    if not isinstance(op, torch._ops.OpOverload) or op.namespace != "aten":
        return False
    if op._schema.is_mutable or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    is_listed = op._schema.name.partition("::")[2] in _CHEAP_OPS
    return is_listed or op.is_view or torch.Tag.pointwise in op.tags


def rematerialize(trace: Trace, most: int) -> int:
    """Recompute values until at most ``most`` bytes are held at a time, or until no value helps.

    Return the number of values that are recomputed.
    """
    recomputed_count, memory_use = 0, MemoryUse(trace)
    lowest_peak = memory_use.bytes
    pending: list[Rematerialization] = []  # changes since the peak was last lowered
    while memory_use.bytes > most:
        change_and_count = _recompute_one(trace, memory_use)
        if change_and_count is None:
            break
        change, memory_use = change_and_count
        pending.append(change)
        if memory_use.bytes < lowest_peak:
            recomputed_count, lowest_peak, pending = (
                recomputed_count + len(pending),
                memory_use.bytes,
                [],
            )
    for change in reversed(pending):  # these did not lower the peak: as much is held elsewhere
        change.undo()
    return recomputed_count


def _recompute_one(
    trace: Trace, memory_use: MemoryUse
) -> tuple[Rematerialization, MemoryUse] | None:
    """Recompute one value for its readers after the peak: the largest for which that helps.

    It helps if the peak does not rise and less is held at the node of the old peak. Return the
    change of the graph and its new ``MemoryUse``; None if no value helps.
    """
    peak = memory_use.peak
    if peak >= len(memory_use.nodes):
        return None
    bytes_at_peak = memory_use.bytes_at(peak)
    tries_left = _TRIES
    for memory in held_for_later(memory_use):
        change = Rematerialization(
            trace, memory_use, memory, lambda n: memory_use.position_of[n] > peak, is_cheap
        )
        if not change.is_done:
            continue
        new_memory_use = MemoryUse(trace)
        if (
            new_memory_use.bytes <= memory_use.bytes
            and new_memory_use.bytes_at(new_memory_use.position_of[memory_use.nodes[peak]])
            < bytes_at_peak
        ):
            return change, new_memory_use
        change.undo()
        tries_left -= 1
        if tries_left == 0:
            break
    return None


def held_for_later(memory_use: MemoryUse) -> list[Any]:
    """Return the values (as ``memory_of``) held at the peak only to be read later, largest first.

    They are computed before the peak and read after it, and the op at the peak does not use them,
    so recomputing them for the later readers can lower the peak.
    """
    peak = memory_use.peak
    used = {n.meta.get("memory") for n in memory_use.nodes[peak].all_input_nodes}
    used.add(memory_use.nodes[peak].meta.get("memory"))
    candidates = [
        (-lifetime.bytes, lifetime.first, memory)
        for memory, lifetime in memory_use.memories.items()
        if lifetime.first < peak < lifetime.last and lifetime.bytes and memory not in used
    ]
    return [memory for _, _, memory in sorted(candidates, key=lambda candidate: candidate[:2])]
