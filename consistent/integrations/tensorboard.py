"""Adapter for TensorBoard: a ``SummaryWriter`` that takes global tensors.

```
writer = SummaryWriter("out/runs")                       # on every rank
writer.add_scalar("loss", loss, step)                    # every rank reads it, rank 0 writes it
```
"""

from __future__ import annotations

from typing import Any

from mirrored.transports.default import current

from .whole import whole


class SummaryWriter:
    """Wrapper of ``torch.utils.tensorboard.SummaryWriter`` that takes global tensors.

    Its methods are those of torch's writer. Call them on every rank, because reading a global
    tensor is a collective; rank 0 alone writes. A plain number, such as ``LossMeter.value``, sends
    nothing.

    Args:
        args, options: arguments of torch's ``SummaryWriter``.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self._writer: Any = None
        if current().rank == 0:
            from torch.utils.tensorboard import SummaryWriter as Writer

            self._writer = Writer(*args, **options)

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            args, options = whole(args), whole(options)
            return None if self._writer is None else getattr(self._writer, name)(*args, **options)

        if name.startswith("__"):
            raise AttributeError(name)
        return call
