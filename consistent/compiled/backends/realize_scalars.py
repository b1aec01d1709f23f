"""Graph rewrite that makes Inductor compute scalars once, instead of for each element that reads
them.

```
%5 = 1 - 0.9 ** step                        %5 = 1 - 0.9 ** step
%6 = lr / %5                       -->      %6 = lr / %5
%9 = m * %6        m: [320, 1280]           %8 = kept(%6)
                                            %9 = m * %8
```

Inductor inlines ops that it counts as cheap into each kernel that reads them, including the powers
of an optimizer's bias correction. Its CPU kernels then compute two powers for every eight elements,
because compilers may not move them out of loops that write to memory, and AdamW takes four times as
long. On a GPU, the threads compute them in parallel, and an additional kernel would cost more.
``kept``, in the drawing, is an op that Inductor does not inline.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from ..parts import module_of


@torch.library.custom_op("consistent::kept", mutates_args=())
def kept(x: Tensor) -> Tensor:
    """Return a copy of ``x``, by an op that Inductor does not inline into its readers.

    So ``x`` is computed once, and not again for each element of what is computed from it.
    """
    return x.clone()


@kept.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


KEPT = torch.ops.consistent.kept.default


@functools.cache
def _register_kept_lowering() -> None:
    from torch._inductor.lowering import register_lowering

    @register_lowering(KEPT, type_promotion_kind=None)
    def _(x: Any) -> Any:
        # A realized buffer is read from memory by other kernels, instead of being inlined into
        # them.
        x.realize()
        return x


def realize_scalars(graph: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """Return ``graph`` with ``kept`` around scalars that ops on larger tensors read.

    Scalars that do not depend on ``inputs`` get none. If an input is not on the CPU, return
    ``graph`` itself. Results and the order of ops are unchanged.
    """
    if any(x.device.type != "cpu" for x in inputs):
        return graph
    _register_kept_lowering()
    new_graph = torch.fx.Graph()
    copies: dict[Node, Node] = {}
    input_dependent: set[Node] = set()

    def copy_for_reader(node: Node, reader: Node) -> Node:
        is_number = node in input_dependent and node.op == "call_function" and _is_number(node)
        if not is_number or not _is_larger(reader):
            return copies[node]
        return new_graph.call_function(KEPT, (copies[node],))

    for node in graph.graph.nodes:
        if node.op == "placeholder" or any(n in input_dependent for n in node.all_input_nodes):
            input_dependent.add(node)
        copies[node] = new_graph.node_copy(node, lambda n, reader=node: copy_for_reader(n, reader))
    return module_of(graph, new_graph)


def _is_number(node: Node) -> bool:
    return node.meta.get("shape") == () and node.meta["dtype"].is_floating_point


def _is_larger(node: Node) -> bool:
    """Return whether ``node`` is a torch op that computes a tensor with at least one dim."""
    op: Any = node.target
    is_aten_op = isinstance(op, torch._ops.OpOverload) and op.namespace == "aten"
    return is_aten_op and not op.is_view and node.meta.get("shape", ()) != ()
