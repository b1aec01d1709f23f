"""Un-alias outputs: results share memory only where those of the recorded ops did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..memory import has_memory, storage_of

Run = Callable[..., Sequence[torch.Tensor]]


def unalias_outputs(graph: GraphModule, run: Run) -> Run:
    """``run``, whose results lie in one memory only where those of the recorded ops did.

    Inductor leaves out copies of what it made, even where several results are such copies: they
    are then parts of one memory, or the very same. Gradients, which are copied out of the buffer
    that they were summed in, would keep all of it; and what is written into one result later would
    be in the other, too.
    """
    *given, end = (n for n in graph.graph.nodes if n.op in ("placeholder", "output"))
    recorded = [node.meta.get("memory", node) for node in end.args[0]]
    stay = {node.meta.get("memory", node) for node in given}

    def run_apart(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        made = list(run(*inputs))
        together: dict[int, set[Any]] = {}  # memory -> the recorded ones that are in it
        for x, memory in zip(made, recorded, strict=True):
            if has_memory(x):
                together.setdefault(storage_of(x), set()).add(memory)
        if all(len(memories) == 1 for memories in together.values()):
            return made
        copies: dict[tuple[int, Any], torch.UntypedStorage] = {}
        for i, (x, memory) in enumerate(zip(made, recorded, strict=True)):
            if has_memory(x) and len(together[storage_of(x)]) > 1 and memory not in stay:
                copy = x.clone()
                keeps = copy.stride() == x.stride() and recorded.count(memory) == 1
                made[i] = copy if keeps else _in_copy(x, memory, copies)
        return made

    return run_apart


def _in_copy(
    x: torch.Tensor, memory: Any, copies: dict[tuple[int, Any], torch.UntypedStorage]
) -> torch.Tensor:
    """``x`` in the copy of its memory that ``memory`` has."""
    storage = x.untyped_storage()
    at = storage_of(x), memory
    if at not in copies:
        copies[at] = storage.clone()
    return x.new_empty(0).set_(copies[at], x.storage_offset(), x.size(), x.stride())
