"""What one rank's values make the backward of an op raise, every rank of the placement raises.

```
          before the node     the node             after it      torch's engine ends
rank 0    they will tell      gives gradients      tell          raises LinAlgError: ... on rank 1
rank 1    they will tell      raises LinAlgError                 tell, and raises the same
```

So ``backward()`` raises the same on all of them, and a program that catches it goes on in step. It
is done for the ops of ``rules/raising.py`` that refuse values in backward. Only a hook before a
node and one after it can be had: after a node that raises the next code of ours is where the engine
was called.

Ranks outside the placement have other nodes and are not told. They learn of it when they
communicate with those that were: from then on nothing that the two send each other fits.
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

from ...movement.world import is_apart
from ...spec import Placement
from ..plans.shards import HookOff, plain
from .agreed import begin, end, on_all, ranks_of, tell, told_by

T = TypeVar("T")

# Nodes of autograd that refuse values. What torch's engine calls them, for an op may make several.
NODES = frozenset(
    f"Linalg{kind}Backward0" for kind in ("Eig", "Eigh", "Svd", "Det", "Slogdet", "SolveEx")
)

# Nodes that put an error off: where values are refused a second backward, torch puts a node that
# raises behind the gradient, and so into one rank's graph alone.
PUTTING_OFF = frozenset({"IndexReduceBackward0", "ScatterReduceBackward0"})
_PUT_OFF = "torch::autograd::Error"

# Nodes whose gradient has a graph that depends on values, so that ranks have other nodes in it.
_DETERMINANT = "LinalgDetBackward0"


class _Thread(threading.local):
    telling: Ranks | None = None  # who will tell each other how the node that runs went


_thread = _Thread()


def watched(placement: Placement, compute: Callable[[], T], operand: torch.Tensor) -> T:
    """``compute()``, of ``operand`` first; in backward the ranks of ``placement`` will tell each
    other how its nodes went."""
    first = torch._C._autograd._get_sequence_nr()  # pyright: ignore[reportAttributeAccessIssue]
    out, ranks = compute(), ranks_of(placement)
    for node in _made_since(first, out):
        if node.name() in NODES:
            node.register_prehook(partial(_begins, ranks))
            node.register_hook(_went_well)
        elif node.name() in PUTTING_OFF:
            node.register_hook(partial(_put_off_alike, ranks))
        if node.name() == _DETERMINANT and operand.is_complex():
            node.register_hook(partial(_as_one_node, ranks, plain(operand)))
    return out


def run(engine: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Torch's engine. If a watched node raises, so do all of its ranks."""
    try:
        return engine(*args, **kwargs)
    except BaseException as error:
        ranks = _ends()
        if ranks is not None and isinstance(error, Exception) and not is_shared(error):
            with _unknown_to_others(ranks):
                tell(error, ranks)
        raise


@contextmanager
def _unknown_to_others(ranks: Ranks) -> Iterator[None]:
    """What is raised inside, all ``ranks`` raise, and no rank outside."""
    try:
        yield
    except Exception:
        if len(ranks) < current().size and not is_apart():
            failures.add()
        raise


def _made_since(first: int, out: Any) -> Iterator[torch.autograd.graph.Node]:
    """The nodes that lead to ``out``, made since the node with number ``first``."""
    waiting: set[Any] = {x.grad_fn for x in tree_leaves(out) if isinstance(x, torch.Tensor)}
    seen: set[Any] = {None}
    while waiting := waiting - seen:
        seen |= waiting
        made = [node for node in waiting if node._sequence_nr() >= first]
        yield from made
        waiting = {after for node in made for after, _ in node.next_functions}


def _begins(ranks: Ranks, grads: Any) -> None:
    _thread.telling = ranks
    begin(ranks)


def _went_well(*grads: Any) -> None:
    ranks = _ends()
    if ranks is not None:
        with _unknown_to_others(ranks):
            tell(None, ranks)


def _put_off_alike(ranks: Ranks, found: tuple[Any, ...], _: Any) -> tuple[Any, ...] | None:
    """The gradients with a node that raises on all ranks where one has it on any."""
    if not torch.is_grad_enabled():
        return None
    notes = current().gather_notes(pickle.dumps(_put_off(found)), ranks)
    for rank, note in zip(ranks, notes, strict=True):
        for index, text in pickle.loads(note).items():
            said = text + told_by(rank)
            refused = Refused.apply(found[index], said, ranks)
            found = (*found[:index], refused, *found[index + 1 :])
    return found


def _put_off(found: Sequence[Any]) -> dict[int, str]:
    """The errors that were put off, by the index of the gradient."""
    errors: dict[int, str] = {}
    for index, x in enumerate(found):
        node = None if x is None else x.grad_fn
        if node is not None and node.name() == _PUT_OFF:
            try:
                node(x)
            except RuntimeError as error:
                errors[index] = str(error)
    return errors


class Refused(torch.autograd.Function):
    """Passes a tensor on that has no derivative, as torch says in ``text``."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, text: str, ranks: Ranks) -> torch.Tensor:
        ctx.text, ctx.ranks = text, ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        with _unknown_to_others(ctx.ranks):
            raise RuntimeError(raised_together(ctx.text))


def _as_one_node(
    ranks: Ranks, matrices: torch.Tensor, found: tuple[Any, ...], given: tuple[Any, ...]
) -> tuple[Any, ...] | None:
    """The gradient of a determinant with a graph of one node, which is the same on all ranks."""
    if not torch.is_grad_enabled() or found[0] is None:
        return None
    return _OfDeterminant.apply(found[0].detach(), matrices, given[0], ranks), *found[1:]


class _OfDeterminant(torch.autograd.Function):
    """``found``: the gradient of the determinant of ``x``, given ``grad``. Its backward is torch's,
    after which the ranks tell each other how it went."""

    @staticmethod
    def forward(ctx: Any, found: Any, x: Any, grad: Any, ranks: Ranks) -> torch.Tensor:
        ctx.save_for_backward(x, grad)
        ctx.ranks = ranks
        return found.view_as(found)

    @staticmethod
    def backward(ctx: Any, *given: Any) -> Any:
        again, saved = torch.is_grad_enabled(), ctx.saved_tensors

        def compute() -> tuple[Any, ...]:
            with torch.enable_grad(), HookOff():
                x, grad = (y.view_as(y) if again and y.requires_grad else _leaf(y) for y in saved)
                (found,) = torch.autograd.grad(torch.linalg.det(x), x, grad, create_graph=True)
                return torch.autograd.grad(
                    found, (x, grad), given[0], create_graph=again, allow_unused=True
                )

        with _unknown_to_others(ctx.ranks):
            return None, *on_all(ctx.ranks, compute), None


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _ends() -> Ranks | None:
    ranks, _thread.telling = _thread.telling, None
    if ranks is not None:
        end(ranks)
    return ranks
