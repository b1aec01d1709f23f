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

    ``backward_to_inputs`` runs the first half, and ``backward_to_parameters``, any time later, the
    second.

    Args:
        roots: the tensors that backward starts from.
        seeds: the gradient of each root; None for a loss.
        inputs: the leaves of the first half, plain tensors.
    """

    def __init__(
        self, roots: Sequence[Any], seeds: Sequence[Any], inputs: Sequence[torch.Tensor]
    ) -> None:
        starts = [_backward_start(root, grad) for root, grad in zip(roots, seeds, strict=True)]
        self._edges = [edge for edge, _ in starts]
        self._seeds = [grad for _, grad in starts]
        self._inputs = list(inputs)
        # Border op -> its edges that do not lead to an input.
        self._border: dict[Node, list[GradientEdge]] = {}
        # Border op -> the gradients that it got in the first half.
        self._border_grads: dict[Node, tuple[torch.Tensor | None, ...]] = {}
        # (edge, gradient) of the roots that lead to no input, only to parameters.
        self._parameter_starts: list[tuple[GradientEdge, torch.Tensor]] = []

    def backward_to_inputs(self) -> list[torch.Tensor | None]:
        """Run the first half, and return the gradients of the inputs.

        None for an input that backward does not reach.
        """
        leaves = {get_gradient_edge(x).node for x in self._inputs}
        path = _nodes_leading_to(leaves, [edge.node for edge in self._edges])
        self._border = {
            node: [GradientEdge(n, k) for n, k in node.next_functions if n and n not in path]
            for node in path
            if node not in leaves
        }
        self._border = {node: side_edges for node, side_edges in self._border.items() if side_edges}
        on_path, off_path = _split_by_path(list(zip(self._edges, self._seeds, strict=True)), path)
        self._parameter_starts = off_path
        if not on_path:
            return [None for _ in self._inputs]
        hooks = [node.register_prehook(self._save_grads_hook(node)) for node in self._border]
        try:
            grads = torch.autograd.grad(
                [edge for edge, _ in on_path],  # type: ignore[arg-type]
                self._inputs,
                [grad for _, grad in on_path],
                retain_graph=True,  # the second half runs the border ops again
                allow_unused=True,
            )
        finally:
            for hook in hooks:
                hook.remove()
        return list(grads)

    def backward_to_parameters(self) -> None:
        """Run the second half: add the parameters' gradients to their ``.grad``."""
        starts = [*self._parameter_starts, *self._border_starts()]
        self._border, self._border_grads, self._parameter_starts = {}, {}, []
        if starts:
            torch.autograd.backward(
                [edge for edge, _ in starts],  # type: ignore[arg-type]
                [grad for _, grad in starts],
            )

    def _save_grads_hook(self, node: Node) -> Any:
        """Return a pre-hook of a border op that keeps the gradients it gets for the second half."""

        def save(grads: tuple[torch.Tensor | None, ...]) -> None:
            self._border_grads[node] = grads

        return save

    def _border_starts(self) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Return the gradients from which the second half starts, each with its edge.

        A border op lies between the roots and the inputs, and also leads to parameters. The
        gradients are those that it sends along its edges to parameters.
        """
        uses = Counter(edge for side_edges in self._border.values() for edge in side_edges)
        starts: list[tuple[GradientEdge, torch.Tensor]] = []
        shared: list[Node] = []
        for node, side_edges in self._border.items():
            if node not in self._border_grads:  # the first half did not reach this op
                continue
            # An edge that several border ops lead to gets the sum of their gradients, so these ops
            # have to run in one backward. The others run one by one.
            if any(uses[edge] > 1 for edge in side_edges):
                shared.append(node)
            else:
                starts += self._run_border_ops([node], side_edges)
        if shared:
            side_edges = dict.fromkeys(edge for node in shared for edge in self._border[node])
            starts += self._run_border_ops(shared, list(side_edges))
        return starts

    def _run_border_ops(
        self, nodes: list[Node], side_edges: list[GradientEdge]
    ) -> list[tuple[GradientEdge, torch.Tensor]]:
        """Run border ops on their kept gradients; return what they send towards parameters.

        Args:
            nodes: the border ops.
            side_edges: the edges from these ops that do not lead to an input.
        """
        starts = [
            (GradientEdge(node, k), torch.zeros_like(grad))
            for node in nodes
            for k, grad in enumerate(self._border_grads[node])
            if grad is not None
        ]
        collected: list[tuple[GradientEdge, torch.Tensor]] = []
        with ExitStack() as stack:
            stack.enter_context(_without_hooks(side_edges))
            for node in nodes:
                # Replaces the zeros by the kept gradients. Runs after all tensor hooks of the node.
                pre_hook = node.register_prehook(lambda _, grads=self._border_grads[node]: grads)
                stack.callback(pre_hook.remove)
                post_hook = type(node).register_hook(
                    node, self._collect_grads_hook(node, collected)
                )
                stack.callback(post_hook.remove)
            torch.autograd.grad(
                [edge for edge, _ in starts],  # type: ignore[arg-type]
                side_edges,  # type: ignore[arg-type]
                [zeros for _, zeros in starts],
                retain_graph=True,
                allow_unused=True,
            )
        return collected

    def _collect_grads_hook(
        self, node: Node, collected: list[tuple[GradientEdge, torch.Tensor]]
    ) -> Any:
        """Return a post-hook of a border op that adds (edge, gradient) to ``collected``.

        It does so for each edge that does not lead to an input. The op then passes zeros on along
        all edges, in place of the gradients.
        """
        side_edges = set(self._border[node])

        def collect(sent: tuple[torch.Tensor | None, ...], _: Any) -> Any:
            for (next_node, k), grad in zip(node.next_functions, sent, strict=True):
                if grad is not None and next_node and GradientEdge(next_node, k) in side_edges:
                    collected.append((GradientEdge(next_node, k), grad))
            return tuple(None if grad is None else torch.zeros_like(grad) for grad in sent)

        return collect


@contextmanager
def _without_hooks(edges: list[GradientEdge]) -> Iterator[None]:
    """Disable the tensor hooks of the leaves at ``edges`` inside the context.

    Hooks of a parameter are to see only the sum of all its gradients.
    """
    disabled: list[tuple[dict, dict]] = []
    try:
        for node in dict.fromkeys(edge.node for edge in edges):
            leaf = getattr(node, "variable", None)
            hooks = None if leaf is None else leaf._backward_hooks
            if hooks:
                disabled.append((hooks, dict(hooks)))
                hooks.clear()  # in place: the engine reads this dict object
        yield
    finally:
        for hooks, saved in disabled:
            hooks.update(saved)


def _backward_start(root: Any, grad: Any) -> tuple[GradientEdge, torch.Tensor]:
    """Return (edge, gradient) from which backward of ``root`` starts in the graph of the shards.

    ``grad`` is the gradient of the root; None for a loss.
    """
    if is_global(root):
        start = seed(root, grad)
        with HookOff():
            return get_gradient_edge(root), plain(start)
    return get_gradient_edge(root), torch.ones_like(root) if grad is None else grad


def _nodes_leading_to(leaves: set[Node], starts: list[Node]) -> dict[Node, None]:
    """Return the nodes below ``starts`` from which one of ``leaves`` can be reached.

    They are nodes of the autograd graph. Their order depends only on the graph, so it is the same
    on all ranks: the backward of some nodes communicates, and ranks must communicate in one order.
    """
    reaches_leaf: dict[Node, bool] = {leaf: True for leaf in leaves}
    # A stack, not recursion: the graphs of deep models exceed Python's recursion limit.
    todo: list[tuple[Node, bool]] = [(node, False) for node in starts]
    while todo:
        node, entered = todo.pop()
        next_nodes = [n for n, _ in node.next_functions if n is not None]
        if entered:
            reaches_leaf[node] = any(reaches_leaf[n] for n in next_nodes)
        elif node not in reaches_leaf:
            reaches_leaf[node] = False
            todo.append((node, True))
            todo += [(n, False) for n in next_nodes if n not in reaches_leaf]
    return {node: None for node, reaches in reaches_leaf.items() if reaches}


def _split_by_path(
    starts: list[tuple[GradientEdge, torch.Tensor]], path: dict[Node, None]
) -> tuple[list[tuple[GradientEdge, torch.Tensor]], list[tuple[GradientEdge, torch.Tensor]]]:
    """Return the starts of backward that lead to an input (in ``path``), and the others."""
    on_path = [start for start in starts if start[0].node in path]
    return on_path, [start for start in starts if start[0].node not in path]
