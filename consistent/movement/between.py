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
from .run import begin_boxing, run_within
from .run_exchange import batch_of


def send(local: Tensor, src: TensorSpec, dst: TensorSpec, label: str) -> list[Handle]:
    """Start sending this rank's parts of a tensor to the ranks of another placement.

    Only the ranks of ``src`` call this, and go on at once; the ranks of ``dst`` call ``receive``.
    Steps of the boxing that stay within the placement of ``src`` are done first.

    Args:
        local: this rank's shard under ``src``.
        src: spec of the tensor.
        dst: spec to box to, on another placement.
        label: text that tells these messages from others in flight; the receivers pass the same.

    Returns:
        Handles by which to wait until the messages are sent.
    """
    x, moves = begin_boxing(local, src, dst)
    (exchange_move,) = (move for move in moves if isinstance(move, Exchange))
    x = run_within(x, src, exchange_move.src)
    messages = batch_of((exchange_move.src, exchange_move.dst), is_target=False).outgoing_messages(
        [x]
    )
    return [current().send(message, to, label) for to, message in messages]


def receive(src: TensorSpec, dst: TensorSpec, label: str) -> Callable[[], Tensor]:
    """Start receiving a tensor that the ranks of ``src`` send; return a function to wait for it.

    Only the ranks of ``dst`` call this, with the ``label`` of the senders. The function that is
    returned takes no arguments and returns this rank's shard under ``dst``.
    """
    (exchange_move,) = (move for move in plan(src, dst) if isinstance(move, Exchange))
    batch = batch_of((exchange_move.src, exchange_move.dst), is_source=False)
    handles = [
        current().receive(shape, dtype, source, label, batch.wire_device)
        for source, shape, dtype in batch.incoming
    ]

    def wait_for_shard() -> Tensor:
        received = [handle.wait() for handle in handles]
        (shard,) = batch.assemble(received, [])  # this rank is outside src: all parts are received
        return run_within(shard, exchange_move.dst, dst)

    return wait_for_shard
