"""on_signal: a signal to one rank, seen by all ranks at the same step."""

from __future__ import annotations

import signal
from typing import Any

import torch

from mirrored.transports.default import current
from mirrored.transports.faults.interrupts import is_default


def on_signal(*signals: int) -> OnSignal:
    """Note ``signals`` that any rank gets, to be asked for between two steps.

    A handler of a signal runs between any two instructions of one rank, where the others are
    elsewhere, so it cannot save. This one only sets a flag:

    ```
    due = consistent.checkpoint.on_signal(signal.SIGUSR1)
    for batch in batches:
        step(batch)
        if due():
            consistent.checkpoint.save("run", model=model, optimizer=optimizer, loader=batches)
    ```

    It is called in the main thread of each rank. The handler that a signal had before, if it is a
    function, is called too. ``close()`` of the result sets it again. To end a loop over a
    ``data.loader``, its ``stop_on`` needs no message of its own.

    Args:
        signals: such as ``signal.SIGUSR1`` and ``signal.SIGTERM``.

    Returns:
        A function for all ranks: whether any of them has got one of the signals since it was called
        last. A collective of the world, of 1 byte.
    """
    return OnSignal(signals)


class OnSignal:
    """What ``on_signal`` returns."""

    def __init__(self, signals: tuple[int, ...]) -> None:
        self._asked = False
        self._before: dict[int, Any] = {}
        for each in signals:
            self._before[each] = signal.signal(each, self._note)

    def __call__(self) -> bool:
        """Whether a rank has got a signal since this was called last; the same on every rank."""
        asked, self._asked = self._asked, False
        transport = current()
        ranks = tuple(range(transport.size))
        return bool(transport.all_reduce(torch.tensor([asked]), ranks, "max"))

    def close(self) -> None:
        """Set the handlers again that the signals had before."""
        for each, before in self._before.items():
            signal.signal(each, signal.SIG_DFL if before is None else before)
        self._before = {}

    def _note(self, number: int, frame: Any) -> None:
        self._asked = True
        before = self._before.get(number)
        if callable(before) and not is_default(before):
            before(number, frame)
