"""Gradients that lie in shares: they are reduced and scattered while backward goes on.

```
program    backward of c | backward of b | backward of a | wait, add to .grad
messages                 c ......        b ......        a ....
```

This is for ranks whose messages travel while they compute. Where ranks share memory each gradient
is reduced and scattered at once: there is no link to keep busy.

Until backward ends a leaf does not have what is on its way. Whoever reads or sets a ``.grad``
before then waits for it first, and for no other rank: what is waited for was started by all ranks
at the same place of the program.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Variable

from ..dispatch import _C
from ..dispatch.plans.shards import HookOff, attach, plain
from ..movement import check_mode
from ..movement.boxed import box
from ..movement.several import Route, Started, start_several
from ..spec import TensorSpec

# Gradients on their way are as large as the gathered parameters: the oldest are waited for where
# all of them together have more bytes.
IN_FLIGHT_BYTES = 8 << 20


class _Flying(NamedTuple):
    leaves: list[Any]
    specs: list[TensorSpec]
    nbytes: int
    started: Started


class _State(threading.local):
    def __init__(self) -> None:
        self.flying: list[_Flying] = []
        self.nbytes = 0  # of all that is on its way
        self.task = -1  # the backward at whose end ``land`` is called


_state = _State()


def may_be_later(leaf: Any, grad: Tensor) -> bool:
    """Whether ``grad`` can be added to the gradient of ``leaf`` when this backward ends; the same
    on all ranks. Its boxing must travel, too."""
    return (
        grad.layout is torch.strided
        and grad.dtype is leaf._spec.dtype
        and not torch.is_grad_enabled()
        and not check_mode.enabled
        and not leaf._post_accumulate_grad_hooks
        and torch._C._current_graph_task_id() != -1
    )


def add_later(
    leaves: Sequence[Any],
    grads: Sequence[Tensor],
    routes: Sequence[Route],
    start: Callable[[Sequence[Tensor], Sequence[Route]], Started] = start_several,
) -> None:
    """Box ``grads`` while backward goes on, and add them to the gradients of ``leaves`` at its end.
    ``start`` starts the boxings."""
    task = torch._C._current_graph_task_id()
    if task != _state.task:
        _state.task = task
        Variable._execution_engine.queue_callback(land)  # type: ignore[attr-defined]
    started = start([x.detach() for x in grads], routes)
    specs, nbytes = [dst for _, dst in routes], sum(x.nbytes for x in grads)
    _state.flying.append(_Flying(list(leaves), specs, nbytes, started))
    _state.nbytes += nbytes
    _C.set_in_flight(True)
    while _state.nbytes - nbytes > IN_FLIGHT_BYTES:
        _land_first()


@torch.no_grad()
def land() -> None:
    """Wait for all that is on its way, and add it in the order in which it was started."""
    while _state.flying:
        _land_first()
    _state.task = -1


def _land_first() -> None:
    first = _state.flying.pop(0)
    _state.nbytes -= first.nbytes
    _C.set_in_flight(bool(_state.flying))
    for leaf, x, spec in zip(first.leaves, first.started.wait(), first.specs, strict=True):
        _add(leaf, x, spec)


def reset() -> None:
    """Forget what a backward that raised has started. Its messages are still received."""
    _state.flying, _state.nbytes, _state.task = [], 0, -1
    _C.set_in_flight(False)


def _add(leaf: Any, x: Tensor, spec: TensorSpec) -> None:
    held = _C.held_gradient(leaf)
    if spec is leaf._spec.dual.with_dtype(spec.dtype):  # P is B along an axis of one rank
        spec = leaf._spec.settled.with_dtype(spec.dtype)
    if held is None:
        _C.set_gradient(leaf, attach(x, spec))
        return
    total = plain(held)
    made = added(total, box(x, spec, held._spec.with_dtype(spec.dtype)))
    if made is not total:  # a sum with entries is dense, and another object, as torch makes it
        _C.set_gradient(leaf, attach(made, held._spec))


def is_dense(*tensors: Tensor) -> bool:
    """Whether none of them has entries."""
    return all(x.layout is torch.strided for x in tensors)


def added(total: Tensor, grad: Tensor) -> Tensor:
    """The sum, in the memory of ``total`` where both are dense."""
    with HookOff():
        if is_dense(total, grad):
            return total.add_(grad)
        return total + grad if is_dense(total) or not is_dense(grad) else grad + total
