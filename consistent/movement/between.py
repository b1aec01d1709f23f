"""Boxing from one placement to another in two halves, so that no rank waits for another.

The ranks of the source send when they have the tensor, and the ranks of the target receive when
they need it, as between the stages of a pipeline.

```
source   moves within it   send ...........................      carries on at once
target          receive (starts early)   ...   wait, moves within it
```
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mirrored.comm import Handle
from mirrored.transports.default import current

from ..boxing.plan import plan
from ..boxing.steps import Exchange
from ..spec import TensorSpec
from .run import begin, run_within
from .run_exchange import batch_of


def send(local: Tensor, src: TensorSpec, dst: TensorSpec, label: str) -> list[Handle]:
    """Start sending this rank's parts of a tensor to another placement, that of ``dst``.

    Only the ranks of ``src`` call this; first they do the moves of the boxing that stay within
    ``src``. ``label`` identifies the messages among all that are in flight; the receivers pass the
    same one.

    Args:
        local: this rank's shard under ``src``.
        src: the present spec.
        dst: the spec to box to, on another placement.
        label: identifies the messages.

    Returns:
        Handles by which to wait until the messages are sent.
    """
    x, moves = begin(local, src, dst)
    (middle,) = (move for move in moves if isinstance(move, Exchange))
    x = run_within(x, src, middle.src)
    messages = batch_of((middle.src, middle.dst), is_target=False).departing([x])
    return [current().send(message, to, label) for to, message in messages]


def receive(src: TensorSpec, dst: TensorSpec, label: str) -> Callable[[], Tensor]:
    """Start receiving a tensor that the ranks of ``src`` send; return a function that waits for it.

    Only the ranks of ``dst`` call this, with the ``label`` of the senders. The function returns
    this rank's shard under ``dst``.
    """
    (middle,) = (move for move in plan(src, dst) if isinstance(move, Exchange))
    batch = batch_of((middle.src, middle.dst), is_source=False)
    handles = [
        current().receive(shape, dtype, source, label, batch.wire)
        for source, shape, dtype in batch.arriving
    ]

    def arrived() -> Tensor:
        received = [handle.wait() for handle in handles]
        (shard,) = batch.assembled(received, [])  # this rank is outside src: all parts are received
        return run_within(shard, middle.dst, dst)

    return arrived
