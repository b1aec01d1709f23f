"""Wrapper of compiled code that restores the memory sharing of results: two results share memory
only if those of the recorded ops did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.fx import GraphModule

from ..memory import has_memory, storage_of

CompiledCallable = Callable[..., Sequence[torch.Tensor]]


def unalias_outputs(graph: GraphModule, run: CompiledCallable) -> CompiledCallable:
    """Return ``run``, wrapped so that results share memory only if those of the recorded ops did.

    Inductor removes copies of values that it computed, so that several results may be the same
    tensor, or views of one storage. Gradients that are copied out of the buffer in which they were
    summed would then keep the whole buffer alive, and a later in-place op on one result would
    change the other.
    """
    *placeholders, end = (n for n in graph.graph.nodes if n.op in ("placeholder", "output"))
    recorded_memories = [node.meta.get("memory", node) for node in end.args[0]]
    input_memories = {node.meta.get("memory", node) for node in placeholders}

    def run_unaliased(*inputs: torch.Tensor) -> Sequence[torch.Tensor]:
        results = list(run(*inputs))
        # Storage -> recorded storages whose values are in it.
        memories_by_storage: dict[int, set[Any]] = {}
        for x, memory in zip(results, recorded_memories, strict=True):
            if has_memory(x):
                memories_by_storage.setdefault(storage_of(x), set()).add(memory)
        if all(len(memories) == 1 for memories in memories_by_storage.values()):
            return results
        copies: dict[tuple[int, Any], torch.UntypedStorage] = {}
        for i, (x, memory) in enumerate(zip(results, recorded_memories, strict=True)):
            if (
                has_memory(x)
                and len(memories_by_storage[storage_of(x)]) > 1
                and memory not in input_memories
            ):
                copy = x.clone()
                can_use_clone = copy.stride() == x.stride() and recorded_memories.count(memory) == 1
                results[i] = copy if can_use_clone else _view_of_storage_copy(x, memory, copies)
        return results

    return run_unaliased


def _view_of_storage_copy(
    x: torch.Tensor, memory: Any, copies: dict[tuple[int, Any], torch.UntypedStorage]
) -> torch.Tensor:
    """Return ``x`` as a view of a copy of its storage.

    Args:
        memory: identifier of the storage of this result when it was recorded. Results with the
            same recorded storage share a copy.
        copies: the copies made so far, to which a new one is added.
    """
    storage = x.untyped_storage()
    key = storage_of(x), memory
    if key not in copies:
        copies[key] = storage.clone()
    return x.new_empty(0).set_(copies[key], x.storage_offset(), x.size(), x.stride())
