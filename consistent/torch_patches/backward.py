"""Changes for backward passes of global tensors: their first gradient, and the end of the pass.

They start from a gradient in the dual SBP, and end when the gradient buckets have been reduced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.autograd import Variable
from torch.autograd.graph import GradientEdge

from ..autograd import backward
from ..dispatch.planning.functions.torch_functions import opened_body
from ..dispatch.plans import gradients
from ..dispatch.plans.plan import handlers
from ..dispatch.plans.shards import attach, is_global, plain
from ..dispatch.running.user_code import current_user_call
from ..movement.differentiable import GatherBackward, gather
from .redirect import redirect


def install() -> None:
    """Redirect the method of torch's autograd engine by which every backward pass starts."""
    engine: Any = type(Variable._execution_engine)  # type: ignore[attr-defined]
    redirect(engine.run_backward, _run_backward, "graph")
    handlers["grad"] = partial(_grad, opened_body(torch.autograd.grad))  # type: ignore[arg-type]


def _run_backward(
    run: Callable[..., Any],
    engine: Any,
    roots: Sequence[Any],
    grads: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Implement the engine's ``run_backward`` for passes that reach global tensors.

    It replaces the first gradients by this rank's shards of them, and runs the engine so that all
    ranks communicate in the same order.

    Args:
        run: torch's method.
        engine: its ``self``.
        roots: the tensors from which backward starts.
        grads: the gradient of each, or None.
        args, kwargs: torch's other arguments.
    """
    if backward.is_handled() and kwargs.get("accumulate_grad"):
        raise RuntimeError(
            "torch.autograd.backward, or loss.backward(inputs=...), inside a step that is run as "
            "a whole, as nn.Graph does: the step scales its losses, and does so where "
            "loss.backward() is called.\n"
            "  Call loss.backward(); for gradients of some tensors alone call "
            "torch.autograd.grad(loss, inputs)."
        )
    seeds = tuple(_local_seed(y, grad) for y, grad in zip(roots, grads, strict=True))
    return _run_with_plain_inputs(
        partial(backward.run_engine, partial(run, engine), tuple(roots), seeds), *args, **kwargs
    )


def _run_with_plain_inputs(
    run: Callable[..., Any],
    keep_graph: bool,
    create_graph: bool,
    inputs: Sequence[Any] = (),
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Run a backward pass, where ``inputs`` may be plain arguments of a user's autograd Function.

    Such an argument was gathered from a global tensor. Its gradient also includes paths that reach
    the global tensor without this argument, such as a parameter through its module. So the engine
    computes the gradient of the global tensor, which is then gathered.

    Args:
        run: starts the pass, given the remaining arguments.
        keep_graph, create_graph, inputs, args, kwargs: those of torch's method.
    """
    gather_nodes = [_gather_node(x) for x in inputs] if current_user_call() is not None else []
    if not any(gather_nodes):
        return run(keep_graph, create_graph, inputs, *args, **kwargs)
    # Gradients are accumulated into leaves; for returned gradients the engine takes an edge.
    if kwargs.get("accumulate_grad"):
        engine_inputs = [
            x if node is None else _gathered_leaf(x, node) for x, node in zip(inputs, gather_nodes)
        ]
        return run(keep_graph, create_graph, tuple(engine_inputs), *args, **kwargs)
    engine_inputs = [
        x if node is None else GradientEdge(*node.next_functions[0])
        for x, node in zip(inputs, gather_nodes, strict=True)
    ]
    grads = run(keep_graph, create_graph, tuple(engine_inputs), *args, **kwargs)
    return tuple(
        g if g is None or node is None else gather(g, node.src.dual.with_dtype(g.dtype))
        for g, node in zip(grads, gather_nodes, strict=True)
    )


def _gather_node(x: Any) -> Any:
    """Return the autograd node that gathered the plain ``x`` from a global tensor, or None."""
    node = None if is_global(x) or not isinstance(x, torch.Tensor) else x.grad_fn
    return node if isinstance(node, GatherBackward) else None


def _gathered_leaf(x: Any, node: Any) -> Any:
    """Return the global leaf that ``node`` has gathered to ``x``, or ``x`` if that was no leaf."""
    return getattr(node.next_functions[0][0], "variable", x)


def _local_seed(y: Any, grad: Any) -> Any:
    """Return the local tensor with which the engine starts backward at ``y``.

    ``grad`` is the gradient that the caller gave, or None.
    """
    if is_global(y):
        return backward.seed(y, grad) if y.requires_grad else None
    return gather(plain(grad), grad._spec) if is_global(grad) else grad


def _grad(opened: Callable[..., Any], outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
    """Implement ``torch.autograd.grad`` for global tensors: run torch's code, with global results.

    The engine returns shards in the dual SBP of each input.

    Args:
        opened: torch's function, whose body runs on global tensors.
        outputs, inputs, args, kwargs: torch's arguments.
    """
    if kwargs.get("is_grads_batched") or (len(args) > 5 and args[5]):
        raise RuntimeError(
            "torch.autograd.grad: is_grads_batched=True runs vmap over the shards of a global "
            "tensor, which would not see the other ranks. Call torch.autograd.grad once per "
            "gradient."
        )
    input_tuple = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    grads = opened(outputs, input_tuple, *args, **kwargs)
    return tuple(_as_global_gradient(x, g) for x, g in zip(input_tuple, grads, strict=True))


def _as_global_gradient(x: Any, g: Any) -> Any:
    """Return the gradient ``g`` of ``x`` as a global tensor if ``x`` is global, else as it is."""
    if not is_global(x) or g is None:
        return g
    # A new object each time: torch gives the same tensor for two inputs whose gradients are equal.
    return attach(plain(g), gradients.gradient_spec(x, g.dtype))
