"""Pass that removes a gather if this rank reads only its own shard of the result.

```
%2 = all_gather(%1)                %2 = all_gather(%1)     removed if nothing else uses it
%3 = slice(%2, own part)    -->    %3 = clone(%1)
```
"""

from __future__ import annotations

import torch
from torch.fx import Node

from ..options import CompileOptions
from .trace import Trace, memory_of

_aten = torch.ops.aten


def remove_redundant_gather(trace: Trace, _: CompileOptions) -> None:
    """Replace slices of gathered tensors by copies of this rank's own shard, where they are equal.

    A gather without other readers is removed. Nothing may modify the shard or the gathered tensor
    between gather and slice.
    """
    for node in list(trace.messages()):
        call = trace.call(node)
        if call.own_part is None or len(call.outs) != 1:
            continue
        dim, start, size = call.own_part
        (shard,) = node.args[0]  # type: ignore[misc]
        for gathered in list(trace.results(node).values()):
            for user in list(gathered.users):
                if _slice_range(user, gathered, len(call.outs[0][0])) != (dim, start, start + size):
                    continue
                if trace.is_written({memory_of(shard)}, node, user):
                    continue
                if not trace.is_unwritten({memory_of(gathered)}):
                    continue
                with trace.graph.inserting_before(user):
                    copy = trace.graph.call_function(_aten.clone.default, (shard,))
                # The slice was a view of the gathered tensor; the copy has memory of its own.
                copy.meta.update(user.meta, memory=object())
                trace.replace(user, copy)
                trace.graph.erase_node(user)
            if not gathered.users and gathered not in trace.lasting:
                trace.remove_message(
                    node, "remove_redundant_gather: only this rank's own part of it is used"
                )


def _slice_range(user: Node, gathered: Node, dims: int) -> tuple[int, int, int] | None:
    """Return (dim, start, end) of the slice that ``user`` takes of ``gathered``.

    ``dims`` is the number of dims of ``gathered``. None: ``user`` is no slice, or one with a step.
    """
    if user.target is not _aten.slice.Tensor or user.args[0] is not gathered or len(user.args) < 4:
        return None
    dim, start, end, *step = user.args[1:]
    if step not in ([], [1]):
        return None
    return int(dim) % dims, int(start), int(end)  # type: ignore[arg-type]
