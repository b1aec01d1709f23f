"""Sharded gradients: they are reduce-scattered over ranks while backward goes on.

```
program    backward of d | backward of c | backward of b | backward of a | wait, add to .grad
messages                                 d, c ......                     b, a ......
```

This is for ranks whose messages travel while they compute. Where ranks share memory each gradient
is reduce-scattered at once, because nothing would overlap.

Until backward ends, the gradient of a leaf lacks addends that wait in a bucket (gradients that are
sent in one message) or are in flight. A program that reads ``.grad`` before then waits for those in
flight, but for no other rank: all ranks have started them at the same place of the program. Addends
that wait in a bucket are shown as P (``shown.py``).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..dispatch import _C
from ..dispatch.plans.shards import HookOff, attach, plain
from ..movement import check_mode
from ..movement.boxed import box
from ..movement.coded import Coders, start_reduces
from ..movement.several import Route, StartedBoxings, start_several
from ..spec import TensorSpec
from . import buckets
from .shown import hidden
from .shown import show as show_waiting

# Limit on the bytes of all gradients in flight, which are as large as the gathered parameters.
# Above the limit, ``_start_boxing`` waits for the oldest gradients.
IN_FLIGHT_BYTES = 8 << 20


class _WaitingGradient(NamedTuple):
    """A gradient that waits in a bucket, to be boxed along ``route`` and added to ``.grad``.

    ``position`` is its index in the C++ code's list of waiting addends.
    """

    position: int
    leaf: Any
    grad: Tensor
    route: Route


class _State(threading.local):
    """Gradients of this thread's backward pass that wait in buckets or are in flight."""

    def __init__(self) -> None:
        # Position -> gradient, in buckets that are not full.
        self.waiting: dict[int, _WaitingGradient] = {}
        self.in_flight: list[_GradientsInFlight] = []
        self.nbytes = 0  # of all gradients in flight


_state = _State()


def can_defer(leaf: Any, grad: Tensor) -> bool:
    """Return whether ``grad`` may be added to ``leaf.grad`` as late as at the end of backward.

    Not if hooks must see it, if it is sparse or has another dtype, in check mode, or if backward is
    itself differentiated. The answer is the same on all ranks. The caller must also check that the
    boxing of ``grad`` is one message that overlaps with computation (``overlap_flags``).
    """
    return (
        grad.layout is torch.strided
        and grad.dtype is leaf._spec.dtype
        and not torch.is_grad_enabled()
        and not check_mode.enabled
        and not leaf._post_accumulate_grad_hooks
        and torch._C._current_graph_task_id() != -1
    )


def defer_gradients(
    leaves: Sequence[Any], grads: Sequence[Tensor], routes: Sequence[Route], coders: Coders = ()
) -> None:
    """Box ``grads`` while backward goes on, and add them to ``.grad`` when it ends.

    Gradients are sent in buckets. If codecs compress them, they are sent at once, since a codec
    keeps state for each gradient.

    Args:
        leaves: the leaf of each gradient.
        grads: this rank's shards of the gradients.
        routes: (spec before, spec after) the boxing of each gradient.
        coders: the codec of each gradient, or None; empty if there are none.
    """
    coders = coders if any(coders) else ()
    numbers = [-1 if coders else _bucket_number(route) for route in routes]
    gradients = []
    for leaf, grad, route, number in zip(leaves, grads, routes, numbers, strict=True):
        x = grad.detach()
        position = _C.hold(leaf, x, number, route[0].largest_nbytes)
        gradients.append(_WaitingGradient(position, leaf, x, route))
    if coders:
        _start_boxing(gradients, coders)
        return
    _state.waiting.update((each.position, each) for each in gradients)
    for number in dict.fromkeys(numbers):
        _C.launch_if_full(number)


@lru_cache(1 << 10)
def _bucket_number(route: Route) -> int:
    """Return the number of the kind of bucket for gradients that are boxed along ``route``."""
    src, dst = route
    axes = tuple(i for i, (e, f) in enumerate(zip(src.sbp, dst.sbp, strict=True)) if e != f)
    return buckets.number_of(src.placement, axes, src.dtype, is_scattered=True)


def send_bucket(positions: Sequence[int]) -> None:
    """Start the boxings of one bucket; C++ calls it when it is full, or when backward ends.

    ``positions`` are the indices of its gradients in the C++ code's list of waiting addends.
    """
    gradients = [_state.waiting.pop(position) for position in positions]
    buckets.count_launched(
        _bucket_number(gradients[0].route), sum(each.route[0].largest_nbytes for each in gradients)
    )
    _start_boxing(gradients, ())


def _start_boxing(gradients: list[_WaitingGradient], coders: Coders) -> None:
    """Start boxing ``gradients``; wait for older ones if too many bytes are in flight."""
    xs, routes = [each.grad for each in gradients], [each.route for each in gradients]
    started = start_reduces(xs, routes, coders) if coders else start_several(xs, routes)
    message = _GradientsInFlight(gradients, sum(x.nbytes for x in xs), started)
    buckets.register_in_flight(message)
    _state.in_flight.append(message)
    _state.nbytes += message.nbytes
    # The newest is not counted, so that this never waits for the message that was just started.
    while _state.nbytes - message.nbytes > IN_FLIGHT_BYTES:
        _state.in_flight[0].finish()


class _GradientsInFlight:
    """Gradients that are being boxed in one message, ``nbytes`` in all, before they are added.

    The tensors that were sent are not kept alive.
    """

    def __init__(
        self, gradients: list[_WaitingGradient], nbytes: int, started: StartedBoxings
    ) -> None:
        self.nbytes, self._started = nbytes, started
        self._targets = [(each.position, each.leaf, each.route[1]) for each in gradients]
        for position, _, _ in self._targets:
            _C.let_go(position)

    def turn(self) -> None:
        """Do nothing: the reduce-scatter takes one message."""

    def goes_to(self, leaf: Any) -> bool:
        """Return whether a gradient of ``leaf`` is among these gradients."""
        return any(target is leaf for _, target, _ in self._targets)

    @torch.no_grad()
    def finish(self) -> None:
        """Wait for the boxed gradients, and add them to the ``.grad`` of their leaves.

        A second call does nothing. Nothing is sent, so a single rank may call this.
        """
        if self not in _state.in_flight:
            return
        _state.in_flight.remove(self)
        _state.nbytes -= self.nbytes
        for (position, leaf, spec), x in zip(self._targets, self._started.wait(), strict=True):
            # False if the leaf was given another gradient meanwhile, which drops its addends.
            if _C.take_back(position):
                with hidden(leaf):
                    _add_to_grad(leaf, x, spec)


def show(leaf: Any) -> Any:
    """Return ``leaf.grad`` for a program that reads it during backward, with all addends included.

    Gradients in flight are waited for and added. Those that wait in a bucket are included in the
    result, which is then P (a sum over ranks that is not made yet).
    """
    for message in tuple(_state.in_flight):
        if message.goes_to(leaf):
            message.finish()
    if not _C.waiting_for(leaf)[0]:
        return _C.held_gradient(leaf)
    return show_waiting(
        leaf, {position: gradient.route[0] for position, gradient in _state.waiting.items()}
    )


def reset() -> None:
    """Drop all gradients that wait or are in flight, after a backward pass that raised.

    Messages in flight are still received.
    """
    _state.waiting, _state.in_flight, _state.nbytes = {}, [], 0


def _add_to_grad(leaf: Any, x: Tensor, spec: TensorSpec) -> None:
    """Add ``x``, this rank's shard of a gradient under ``spec``, to ``leaf.grad``."""
    held_grad = _C.held_gradient(leaf)
    if spec is leaf._spec.dual.with_dtype(spec.dtype):  # on axes of one rank P equals B
        spec = leaf._spec.settled.with_dtype(spec.dtype)
    if held_grad is None:
        _C.set_gradient(leaf, attach(x, spec))
        return
    total = plain(held_grad)
    new_total = add_gradients(total, box(x, spec, held_grad._spec.with_dtype(spec.dtype)))
    if new_total is not total:  # with a sparse operand the sum is a new object, as in torch
        _C.set_gradient(leaf, attach(new_total, held_grad._spec))


def is_dense(*tensors: Tensor) -> bool:
    """Return whether none of the tensors is sparse."""
    return all(x.layout is torch.strided for x in tensors)


def add_gradients(total: Tensor, grad: Tensor) -> Tensor:
    """Return ``total + grad``, in place in ``total`` if both are dense; either may be sparse."""
    with HookOff():
        if is_dense(total, grad):
            return total.add_(grad)
        return total + grad if is_dense(total) or not is_dense(grad) else grad + total
