"""Run a backward in two halves: first the gradients of a stage's inputs, later of its parameters.

The stage before waits only for the first half.

```
            g1          g2          g3
input <--- op1 <------ op2 <------ op3 <--- output        first half: along the inputs' path
            |           |           |                     gradients g that a border op gets are kept
            w1          w2          w3                    second half: each border op once more, for
                                                          its parameters alone
```

A *border op* is a graph node on a path to an input that also leads to parameters off that path.
The two halves compute different gradients; nothing is computed twice.

Tensor hooks take effect once. The gradient of a border op is kept as the tensor hooks of the first
half leave it, and the hooks of a parameter see the sum of all its gradients. Torch cannot run a
border op without the tensor hooks of its outputs, so the second half calls these hooks again, on
zeros, and drops what they return.
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
    """Backward from ``roots`` in two halves: to the leaves ``inputs``, then to the parameters.

    ``of_inputs`` runs the first half, and ``of_weights``, any time later, the second.

    Args:
        roots: the tensors that backward starts from.
        seeds: the gradient of each root; None for a loss.
        inputs: the leaves of the first half, plain tensors.
    """

    def __init__(
        self, roots: Sequence[Any], seeds: Sequence[Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        starts = [_local(root, given) for root, given in zip(roots, seeds, strict=True)]
        self._edges = [edge for edge, _ in starts]
        self._seeds = [given for _, given in starts]
        self._inputs = list(inputs)
        # Border op -> its edges that do not lead to an input.
        self._border: dict[Node, list[GradientEdge]] = {}
        # Border op -> the gradients that it got in the first half.
        self._kept: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        # (edge, gradient) of the roots that lead to no input, only to parameters.
        self._beside: list[tuple[GradientEdge, torch.Tensor]] = []

    def of_inputs(self) -> list[torch.Tensor | None]:
        """Run the first half, and return the gradients of the inputs.

        None for an input that backward does not reach.
        """
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
                retain_graph=True,  # the second half runs the border ops again
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(found)

    def of_weights(self) -> None:
        """Run the second half: add the parameters' gradients to their ``.grad``."""
        found = [*self._beside, *self._from_border()]
        self._border, self._kept, self._beside = {}, {}, []
        if found:
            torch.autograd.backward(
                [edge for edge, _ in found],  # type: ignore[arg-type]
                [given for _, given in found],
            )

    def _keeper(self, node: Node) -> Any:
        """Return a pre-hook of a border op that keeps the gradients it gets, for ``of_weights``."""

        def keep(grads: tuple[torch.Tensor | None, ...]) -> None:
            self._kept[node] = grads

        return keep

    def _from_border(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Return the gradients from which the second half starts, each with its edge.

        A border op lies between the roots and the inputs, and also leads to parameters. The
        gradients are those that it sends along its edges to parameters.
        """
        uses = Counter(edge for beside in self._border.values() for edge in beside)
        found: list[tuple[GradientEdge, torch.Tensor]] = []
        shared: list[Node] = []
        for node, beside in self._border.items():
            if node not in self._kept:  # the first half did not reach this op
                continue
            # An edge that several border ops lead to gets the sum of their gradients, so these ops
            # have to run in one backward. The others run one by one.
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
        """Run border ops on their kept gradients; return what they send towards parameters.

        Args:
            nodes: the border ops.
            beside: the edges from these ops that do not lead to an input.
        """
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
                # Replaces the zeros by the kept gradients. Runs after all tensor hooks of the node.
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
        """Return a post-hook of a border op that adds (edge, gradient) to ``found``.

        It does so for each edge that does not lead to an input. The op then passes zeros on along
        all edges, in place of the gradients.
        """
        beside = set(self._border[node])

        def take(sent: tuple[torch.Tensor | None, ...], _: Any) -> Any:
            for (after, k), grad in zip(node.next_functions, sent, strict=True):
                if grad is not None and after and GradientEdge(after, k) in beside:
                    found.append((GradientEdge(after, k), grad))
            return tuple(None if grad is None else torch.zeros_like(grad) for grad in sent)

        return take


@contextmanager
def _without_hooks(edges: list[GradientEdge]) -> Iterator[None]:
    """Disable the tensor hooks of the leaves at ``edges`` inside the context.

    Hooks of a parameter are to see only the sum of all its gradients.
    """
    kept: list[tuple[dict, dict]] = []
    try:
        for node in dict.fromkeys(edge.node for edge in edges):
            leaf = getattr(node, "variable", None)
            hooks = None if leaf is None else leaf._backward_hooks
            if hooks:
                kept.append((hooks, dict(hooks)))
                hooks.clear()  # in place: the engine reads this dict object
        yield
    finally:
        for hooks, before in kept:
            hooks.update(before)


def _local(root: Any, given: Any) -> tuple[GradientEdge, torch.Tensor]:
    """Return (edge, gradient) from which backward of ``root`` starts in the graph of the shards.

    ``given`` is the gradient of the root; None for a loss.
    """
    if is_global(root):
        start = seed(root, given)
        with HookOff():
            return get_gradient_edge(root), plain(start)
    return get_gradient_edge(root), torch.ones_like(root) if given is None else given


def _leading_to(leaves: set[Node], starts: list[Node]) -> dict[Node, None]:
    """Return the nodes below ``starts`` from which one of ``leaves`` can be reached.

    They are nodes of the autograd graph. Their order depends only on the graph, so it is the same
    on all ranks: the backward of some nodes communicates, and ranks must communicate in one order.
    """
    leads: dict[Node, bool] = {leaf: True for leaf in leaves}
    # A stack, not recursion: the graphs of deep models exceed Python's recursion limit.
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
    """Return the starts of backward that lead to an input (in ``path``), and the others."""
    on = [start for start in starts if start[0].node in path]
    return on, [start for start in starts if start[0].node not in path]
