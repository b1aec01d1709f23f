"""Backends of compiled steps.

A backend turns the fx graph of a segment and example inputs into a callable. Each compiled step has
its own backend object.

```
ops          each op as it was recorded
inductor     torch's Inductor                      inductor.py
               specialized to the sizes of the graph
               with symbols, for several sizes     form.py (what graphs share), symbolic.py
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.fx import GraphModule

from .inductor import Inductor
from .unalias_outputs import CompiledCallable

Backend = Callable[[GraphModule, Sequence[torch.Tensor]], CompiledCallable]


# With grad mode off, as it is in a program, the kernels of these ops omit what backward reads.
_OPS_READING_GRAD_MODE = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})


def by_ops(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> CompiledCallable:
    """Backend "ops": return a function that runs the recorded ops one by one."""
    if any(node.target in _OPS_READING_GRAD_MODE for node in graph.graph.nodes):
        return partial(_run_in_grad_mode, graph.forward)
    return graph.forward


def _run_in_grad_mode(run: CompiledCallable, *inputs: torch.Tensor) -> Sequence[torch.Tensor]:
    """Call ``run`` in grad mode, in which its ops were recorded.

    Some kernels omit results that backward reads if grad mode is off, as it is while a program
    runs. No autograd graph is made, because the inputs do not require grad.
    """
    with torch.enable_grad():
        return run(*(x.detach() for x in inputs))


BACKENDS: dict[str, Callable[[], Backend]] = {"inductor": Inductor, "ops": lambda: by_ops}

__all__ = ["BACKENDS", "Backend", "CompiledCallable", "by_ops"]
