"""``on_signal``: a check that all ranks make at the same step, whether any of them got a signal."""

from __future__ import annotations

import signal
from typing import Any

import torch

from mirrored.transports.default import current
from mirrored.transports.faults.interrupts import is_default


def on_signal(*signals: int) -> OnSignal:
    """Record ``signals`` that a rank receives; return a function that checks for them.

    A signal handler runs between any two instructions of one rank, while the other ranks are
    elsewhere in the program, so it cannot save. This handler only sets a flag:

    ```
    due = consistent.checkpoint.on_signal(signal.SIGUSR1)
    for batch in batches:
        step(batch)
        if due():
            consistent.checkpoint.save("run", model=model, optimizer=optimizer, loader=batches)
    ```

    Call it in the main thread of each rank. A signal's previous handler is called too, if it is a
    function, and ``close()`` of the result restores it. To end a loop over a ``data.loader``, use
    the loader's ``stop_on``, which sends no extra message.

    Args:
        signals: such as ``signal.SIGUSR1`` and ``signal.SIGTERM``.

    Returns:
        A function that all ranks call. It returns whether any of them has received one of the
            signals since its last call. A collective of the world, of 1 byte.
    """
    return OnSignal(signals)


class OnSignal:
    """Result of ``on_signal``; calling it returns whether any rank has received a signal.

    Its handlers only set a flag of this rank, which the call combines with those of other ranks.
    """

    def __init__(self, signals: tuple[int, ...]) -> None:
        self._got_signal = False
        self._previous_handlers: dict[int, Any] = {}
        for number in signals:
            self._previous_handlers[number] = signal.signal(number, self._record_signal)

    def __call__(self) -> bool:
        """Return whether any rank has got a signal since the last call; the same on all ranks.

        A collective.
        """
        # Cleared before the all-reduce, so that a signal during it counts for the next call.
        got_signal, self._got_signal = self._got_signal, False
        transport = current()
        ranks = tuple(range(transport.size))
        return bool(transport.all_reduce(torch.tensor([got_signal]), ranks, "max"))

    def close(self) -> None:
        """Restore the handlers that the signals had before ``on_signal``."""
        # None: the previous handler was not installed from Python, and cannot be set again.
        for number, handler in self._previous_handlers.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
        self._previous_handlers = {}

    def _record_signal(self, number: int, frame: Any) -> None:
        self._got_signal = True
        handler = self._previous_handlers.get(number)
        if callable(handler) and not is_default(handler):
            handler(number, frame)
