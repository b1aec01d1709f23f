"""Wrapper of compiled code that restores the memory sharing of results: two results share memory
only if those of the recorded ops did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..memory import has_memory, storage_of

Run = Callable[..., Sequence[torch.Tensor]]


def unalias_outputs(graph: GraphModule, run: Run) -> Run:
    """Return ``run``, wrapped so that results share memory only if those of the recorded ops did.

    Inductor removes copies of values that it computed, so that several results may be the same
    tensor, or views of one storage. Gradients that are copied out of the buffer in which they were
    summed would then keep the whole buffer alive, and later writes into one result would change the
    other.
    """
    *given, end = (n for n in graph.graph.nodes if n.op in ("placeholder", "output"))
    recorded = [node.meta.get("memory", node) for node in end.args[0]]
    stay = {node.meta.get("memory", node) for node in given}

    def run_apart(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        made = list(run(*inputs))
        together: dict[int, set[Any]] = {}  # storage -> recorded storages whose values are in it
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
    """Return ``x`` as a view of a copy of its storage.

    Args:
        memory: identifier of the storage of this result when it was recorded. Results with the
            same recorded storage share a copy.
        copies: the copies made so far, to which a new one is added.
    """
    storage = x.untyped_storage()
    at = storage_of(x), memory
    if at not in copies:
        copies[at] = storage.clone()
    return x.new_empty(0).set_(copies[at], x.storage_offset(), x.size(), x.stride())
