"""What runs the ops of a segment: the functions that make a callable of an fx graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

Run = Callable[..., Sequence[torch.Tensor]]


def by_ops(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Run:
    """Each op as it was recorded."""
    return graph.forward


def by_inductor(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Run:
    """Kernels made by torch's Inductor; random ops of torch stay torch's, so that they draw the
    numbers of an eager step. What was compiled once is kept on disk by torch."""
    if any(x.is_meta for x in inputs):
        return by_ops(graph, inputs)
    import torch._inductor.config as config
    from torch._inductor.compile_fx import compile_fx

    with config.patch(fallback_random=True):
        return compile_fx(graph, list(inputs))  # type: ignore[return-value]


BACKENDS: dict[str, Callable[[GraphModule, Sequence[torch.Tensor]], Run]] = {
    "inductor": by_inductor,
    "ops": by_ops,
}
