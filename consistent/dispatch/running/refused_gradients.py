"""Agreement on errors in backward: if an op's backward raises on one rank, all of its ranks raise.

```
          hook before node   the node             hook after it     the engine has raised
rank 0    will exchange      gives gradients      exchange errors,
                                                  raise the error
rank 1    will exchange      raises LinAlgError                     exchange errors, raise the error
```

So ``backward()`` raises the same error on all ranks of the placement, and a program that catches it
stays in step. This is done for the ops of ``rules/raising.py`` whose backward refuses some values.
Torch offers only a hook before a node and one after it. If the node raises, the hook after it does
not run, and this library regains control only where it called the engine.

Ranks outside the placement have other nodes, and are not sent the error. They notice it when they
next communicate with ranks of the placement: from then on the messages of the two do not match.
"""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves

from mirrored.comm import Ranks
from mirrored.transports import failures
from mirrored.transports.default import current
from mirrored.transports.failures import is_shared, raised_together

from ...movement.world import excludes_others
from ...spec import Placement
from ..plans.shards import HookOff, plain
from .agreed import (
    begin_agreement,
    end_agreement,
    error_origin_text,
    exchange_errors,
    ranks_of,
    run_with_shared_errors,
)

T = TypeVar("T")

# Autograd nodes that refuse some values. Listed by node name rather than op, since an op may make
# several nodes.
RAISING_NODES = frozenset(
    f"Linalg{kind}Backward0" for kind in ("Eig", "Eigh", "Svd", "Det", "Slogdet", "SolveEx")
)

# Nodes that defer an error: if torch cannot differentiate their gradient again for some values, it
# adds a node that raises to the gradient's graph, on the one rank that has these values.
DEFERRING_NODES = frozenset({"IndexReduceBackward0", "ScatterReduceBackward0"})
_ERROR_NODE = "torch::autograd::Error"

# Node whose gradient has a graph that depends on values, so that its nodes differ between ranks.
_DETERMINANT = "LinalgDetBackward0"


class _ThreadState(threading.local):
    exchanging: Ranks | None = None  # ranks that will exchange errors after the node that runs now


_thread = _ThreadState()


def watch_backward_errors(
    placement: Placement, compute: Callable[[], T], operand: torch.Tensor
) -> T:
    """Return ``compute()``, an op on shards, and let the ranks exchange errors in its backward.

    For this it registers hooks at those nodes of the result that may raise on some ranks only.
    ``operand`` is the first operand of the op.
    """
    # Sequence numbers grow, so nodes of this op have at least this one.
    first = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
    out, ranks = compute(), ranks_of(placement)
    for node in _nodes_since(first, out):
        if node.name() in RAISING_NODES:
            node.register_prehook(partial(_before_node, ranks))
            node.register_hook(_after_node)
        elif node.name() in DEFERRING_NODES:
            node.register_hook(partial(_share_deferred_errors, ranks))
        if node.name() == _DETERMINANT and operand.is_complex():
            node.register_hook(partial(_replace_determinant_graph, ranks, plain(operand)))
    return out


def run_backward(engine: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Call ``engine``, torch's backward, so that an error of a watched node is raised on all ranks.

    A node is watched if ``watch_backward_errors`` has registered hooks at it, and the ranks are
    those of its placement. Any other error is raised as it is, on this rank.
    """
    try:
        return engine(*args, **kwargs)
    except BaseException as error:
        # In any case, so that a later pass does not find the mark of this one.
        ranks = _end_exchange()
        if ranks is not None and isinstance(error, Exception) and not is_shared(error):
            with _count_failure(ranks):
                exchange_errors(error, ranks)
        raise


@contextmanager
def _count_failure(ranks: Ranks) -> Iterator[None]:
    """Count an error that the body raises as a failure, if only some ranks of the world raise it.

    ``ranks`` are those that raise it. Messages contain the count (``failures``), so that other
    ranks notice.
    """
    try:
        yield
    except Exception:
        if len(ranks) < current().size and not excludes_others():
            failures.add_failures()
        raise


def _nodes_since(first: int, out: Any) -> Iterator[torch.autograd.graph.Node]:
    """Yield the autograd nodes in the graph of ``out`` that the op itself has made.

    They have sequence numbers from ``first``, which torch would have given next before the op ran.
    """
    pending: set[Any] = {x.grad_fn for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
    seen: set[Any] = {None}
    while pending := pending - seen:
        seen |= pending
        nodes = [node for node in pending if node._sequence_nr() >= first]
        yield from nodes
        pending = {next_node for node in nodes for next_node, _ in node.next_functions}


def _before_node(ranks: Ranks, grads: Any) -> None:
    """Hook before a watched node: note that its ``ranks`` will exchange errors."""
    _thread.exchanging = ranks
    begin_agreement(ranks)


def _after_node(*grads: Any) -> None:
    """Hook after a watched node, which is called if the node has not raised: exchange errors."""
    ranks = _end_exchange()
    if ranks is not None:
        with _count_failure(ranks):
            exchange_errors(None, ranks)


def _share_deferred_errors(ranks: Ranks, grads: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
    """Hook after a node: if torch defers an error on one rank, defer it on all ``ranks``.

    Torch defers an error by a node in the graph of a gradient, which raises if the gradient is
    differentiated again. ``grads`` are the gradients that the node returned. Returns the new
    gradients, or None if no graph is recorded.
    """
    if not torch.is_grad_enabled():
        return None
    notes = current().gather_notes(pickle.dumps(_deferred_errors(grads)), ranks)
    for rank, note in zip(ranks, notes, strict=True):
        for index, text in pickle.loads(note).items():
            message = text + error_origin_text(rank)
            grad_that_raises = RaiseInBackward.apply(grads[index], message, ranks)
            grads = (*grads[:index], grad_that_raises, *grads[index + 1 :])
    return grads


def _deferred_errors(grads: Sequence[Any]) -> dict[int, str]:
    """Return the messages of errors that torch has deferred in the gradients ``grads``.

    By the index of their gradient. See ``_share_deferred_errors``.
    """
    errors: dict[int, str] = {}
    for index, x in enumerate(grads):
        node = None if x is None else x.grad_fn
        if node is not None and node.name() == _ERROR_NODE:
            try:
                # Calling the node is how its message can be read: it raises and has no other
                # effect.
                node(x)
            except RuntimeError as error:
                errors[index] = str(error)
    return errors


class RaiseInBackward(torch.autograd.Function):
    """Identity whose backward raises the error ``text``, on all ``ranks``.

    It marks a value, or a gradient, that cannot be differentiated.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, text: str, ranks: Ranks) -> torch.Tensor:
        ctx.text, ctx.ranks = text, ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with _count_failure(ctx.ranks):
            raise RuntimeError(raised_together(ctx.text))


def _replace_determinant_graph(
    ranks: Ranks,
    matrices: torch.Tensor,
    input_grads: tuple[Any, ...],
    output_grads: tuple[Any, ...],
) -> tuple[Any, ...] | None:
    """Replace the graph of a determinant's gradient by one node, the same on all ranks.

    A hook after the determinant's node, with its gradients: ``input_grads`` of its inputs,
    ``output_grads`` of its output. ``matrices`` are the input.
    """
    if not torch.is_grad_enabled() or input_grads[0] is None:
        return None
    return _DeterminantGradient.apply(
        input_grads[0].detach(), matrices, output_grads[0], ranks
    ), *input_grads[1:]


class _DeterminantGradient(torch.autograd.Function):
    """Identity on ``input_grad``, the gradient of ``det(x)``, with one backward node on all ranks.

    ``input_grad`` is what torch computed from ``x`` and ``grad``, the gradient of the determinant.
    The backward differentiates that formula again by torch, after which the ranks exchange errors.
    """

    @staticmethod
    def forward(ctx: Any, input_grad: Any, x: Any, grad: Any, ranks: Ranks) -> torch.Tensor:
        ctx.save_for_backward(x, grad)
        ctx.ranks = ranks
        return input_grad.view_as(input_grad)

    @staticmethod
    def backward(ctx: Any, *output_grads: Any) -> Any:
        twice, saved = torch.is_grad_enabled(), ctx.saved_tensors

        def compute() -> tuple[Any, ...]:
            with torch.enable_grad(), HookOff():
                x, grad = (y.view_as(y) if twice and y.requires_grad else _leaf(y) for y in saved)
                (input_grad,) = torch.autograd.grad(torch.linalg.det(x), x, grad, create_graph=True)
                return torch.autograd.grad(
                    input_grad, (x, grad), output_grads[0], create_graph=twice, allow_unused=True
                )

        with _count_failure(ctx.ranks):
            return None, *run_with_shared_errors(ctx.ranks, compute), None


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _end_exchange() -> Ranks | None:
    """Undo ``_before_node``; return the ranks that were to exchange errors, or None."""
    ranks, _thread.exchanging = _thread.exchanging, None
    if ranks is not None:
        end_agreement(ranks)
    return ranks
