"""Backward in two halves: gradients of a stage's inputs, which the stage before waits for, and
later those of its parameters.

```
            g1          g2          g3
input <--- op1 <------ op2 <------ op3 <--- output        first half: along the inputs' path
            |           |           |                     gradients g that a border op gets are kept
            w1          w2          w3                    second half: each border op once more, for
                                                          its parameters alone
```

A *border op* lies on a path to an input, and leads to parameters beside it. Neither half computes
what the other one does.

Hooks count once: a gradient is kept as the tensor hooks of the first half leave it, and those of
parameters see the sum of what arrives. Torch has no way to run a border op without the tensor hooks
of its outputs: in the second half they are called again, on zeros, and what they return is dropped.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge

from ..autograd.backward import seed
from ..dispatch.plans.shards import HookOff, is_global, plain

Node = Any


class SplitBackward:
    """One backward, from ``roots`` with the gradients ``seeds`` (None: of a loss), to the plain
    leaves ``inputs`` first."""

    def __init__(
        self, roots: Sequence[Any], seeds: Sequence[Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        starts = [_local(root, given) for root, given in zip(roots, seeds, strict=True)]
        self._edges = [edge for edge, _ in starts]
        self._seeds = [given for _, given in starts]
        self._inputs = list(inputs)
        self._border: dict[Node, list[GradientEdge]] = {}
        self._kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        self._beside: list[tuple[GradientEdge, torch.Tensor]] = []

    def of_inputs(self) -> list[torch.Tensor | None]:
        """The gradients of the inputs; None of those that backward does not reach."""
        leaves = {get_gradient_edge(x).node for x in self._inputs}
        path = _leading_to(leaves, [edge.node for edge in self._edges])
        self._border = {
            node: [GradientEdge(n, k) for n, k in node.next_functions if n and n not in path]
            for node in path
            if node not in leaves
        }
        self._border = {node: beside for node, beside in self._border.items() if beside}
        on, off = _apart(list(zip(self._edges, self._seeds, strict=True)), path)
        self._beside = off
        if not on:
            return [None for _ in self._inputs]
        hooks = [node.register_prehook(self._keeper(node)) for node in self._border]
        try:
            found = torch.autograd.grad(
                [edge for edge, _ in on],  # type: ignore[arg-type]
                self._inputs,
                [given for _, given in on],
                retain_graph=True,
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def of_weights(self) -> None:
        """Add the gradients of parameters to theirs."""
        found = [*self._beside, *self._from_border()]
        self._border, self._kept, self._beside = {}, {}, []
        if found:
            torch.autograd.backward(
                [edge for edge, _ in found],  # type: ignore[arg-type]
                [given for _, given in found],
            )

    def _keeper(self, node: Node) -> Any:
        def keep(grads: tuple[torch.Tensor | None, ...]) -> None:
            self._kept[node] = grads

        return keep

    def _from_border(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Every gradient that crosses the border."""
        uses = Counter(edge for beside in self._border.values() for edge in beside)
        found: list[tuple[GradientEdge, torch.Tensor]] = []
        shared: list[Node] = []
        for node, beside in self._border.items():
            if node not in self._kept:  # backward did not come here
                continue
            if any(uses[edge] > 1 for edge in beside):
                shared.append(node)
            else:
                found += self._crossing([node], beside)
        if shared:
            beside = dict.fromkeys(edge for node in shared for edge in self._border[node])
            found += self._crossing(shared, list(beside))
        return found

    def _crossing(
        self, nodes: list[Node], beside: list[GradientEdge]
    ) -> list[tuple[GradientEdge, torch.Tensor]]:
        """The gradients that ``nodes`` send along ``beside``, from what they got."""
        starts = [
            (GradientEdge(node, k), torch.zeros_like(grad))
            for node in nodes
            for k, grad in enumerate(self._kept[node])
            if grad is not None
        ]
        found: list[tuple[GradientEdge, torch.Tensor]] = []
        with ExitStack() as stack:
            stack.enter_context(_without_hooks(beside))
            for node in nodes:
                # Whatever arrives, it gets what it got. This runs after all tensor hooks.
                before = node.register_prehook(lambda _, got=self._kept[node]: got)
                stack.callback(before.remove)
                after = type(node).register_hook(node, self._taker(node, found))
                stack.callback(after.remove)
            torch.autograd.grad(
                [edge for edge, _ in starts],  # type: ignore[arg-type]
                beside,  # type: ignore[arg-type]
                [given for _, given in starts],
                retain_graph=True,
                allow_unused=True,
            )
        return found

    def _taker(self, node: Node, found: list[tuple[GradientEdge, torch.Tensor]]) -> Any:
        """A hook that takes what ``node`` sends beside the path; zeros go on in its place."""
        beside = set(self._border[node])

        def take(sent: tuple[torch.Tensor | None, ...], _: Any) -> Any:
            for (after, k), grad in zip(node.next_functions, sent, strict=True):
                if grad is not None and after and GradientEdge(after, k) in beside:
                    found.append((GradientEdge(after, k), grad))
            return tuple(None if grad is None else torch.zeros_like(grad) for grad in sent)

        return take


@contextmanager
def _without_hooks(edges: list[GradientEdge]) -> Iterator[None]:
    """Inside, the tensor hooks of leaves at ``edges`` are not called."""
    kept: list[tuple[dict, dict]] = []
    try:
        for node in dict.fromkeys(edge.node for edge in edges):
            leaf = getattr(node, "variable", None)
            hooks = None if leaf is None else leaf._backward_hooks
            if hooks:
                kept.append((hooks, dict(hooks)))
                hooks.clear()  # the engine reads this very dict
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _local(root: Any, given: Any) -> tuple[GradientEdge, torch.Tensor]:
    """Where backward begins in the graph of the shards, and with which gradient."""
    if is_global(root):
        start = seed(root, given)
        with HookOff():
            return get_gradient_edge(root), plain(start)
    return get_gradient_edge(root), torch.ones_like(root) if given is None else given


def _leading_to(leaves: set[Node], starts: list[Node]) -> dict[Node, None]:
    """The nodes from which one of ``leaves`` is reached, in an order that depends on the graph
    alone: backward of some of them communicates, and ranks do so in one order."""
    leads: dict[Node, bool] = {leaf: True for leaf in leaves}  # these have no border
    todo: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while todo:
        node, entered = todo.pop()
        after = [n for n, _ in node.next_functions if n is not None]
        if entered:
            leads[node] = any(leads[n] for n in after)
        elif node not in leads:
            leads[node] = False
            todo.append((node, True))
            todo += [(n, False) for n in after if n not in leads]
    return {node: None for node, does in leads.items() if does}


def _apart(
    starts: list[tuple[GradientEdge, torch.Tensor]], path: dict[Node, None]
) -> tuple[list[tuple[GradientEdge, torch.Tensor]], list[tuple[GradientEdge, torch.Tensor]]]:
    on = [start for start in starts if start[0].node in path]
    return on, [start for start in starts if start[0].node not in path]
