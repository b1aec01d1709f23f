"""What runs the ops of a segment. A backend makes a callable of an fx graph and its inputs; each
compiled step has one of its own.

```
ops          each op as it was recorded
inductor     torch's Inductor                      inductor.py
               with the numbers of the graph
               with symbols, for several sizes     form.py: what graphs have in common, symbolic.py
```
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch.fx import GraphModule

from .inductor import Inductor
from .unalias_outputs import Run

Backend = Callable[[GraphModule, Sequence[torch.Tensor]], Run]


def by_ops(graph: GraphModule, inputs: Sequence[torch.Tensor]) -> Run:
    return graph.forward


BACKENDS: dict[str, Callable[[], Backend]] = {"inductor": Inductor, "ops": lambda: by_ops}

__all__ = ["BACKENDS", "Backend", "Run", "by_ops"]
