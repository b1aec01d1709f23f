"""An exchange between two placements in two halves, so that no rank waits for another one's turn:
the ranks of the source send when they have the tensor, those of the target receive when they need
it.

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
    """Start sending this rank's parts of a tensor under ``src`` to the ranks of ``dst``, which is
    on another placement. Called by the ranks of ``src`` alone; they do the moves within it.

    ``label`` tells messages under way apart; the receivers give the same.
    """
    x, moves = begin(local, src, dst)
    (middle,) = (move for move in moves if isinstance(move, Exchange))
    x = run_within(x, src, middle.src)
    messages = batch_of((middle.src, middle.dst), is_target=False).departing([x])
    return [current().send(message, to, label) for to, message in messages]


def receive(src: TensorSpec, dst: TensorSpec, label: str) -> Callable[[], Tensor]:
    """Start receiving a tensor that the ranks of ``src`` send. Called by the ranks of ``dst``
    alone; the function that it returns waits, and gives this rank's shard under ``dst``."""
    (middle,) = (move for move in plan(src, dst) if isinstance(move, Exchange))
    batch = batch_of((middle.src, middle.dst), is_source=False)
    handles = [
        current().receive(shape, dtype, source, label, batch.wire)
        for source, shape, dtype in batch.arriving
    ]

    def arrived() -> Tensor:
        received = [handle.wait() for handle in handles]
        (shard,) = batch.assembled(received, [])  # it has no part of its own
        return run_within(shard, middle.dst, dst)

    return arrived
