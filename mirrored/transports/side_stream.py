"""A message on a stream of its own, beside what a GPU computes for the program.

```
program's stream   make x | ready | compute ...               | wait for done | read the result
side stream                 wait for ready | message | done
```

What is sent and received may not be given to others while either stream works on it
(``record_stream``). The rules are those of
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Tensor]], list[Tensor]]

cuda: Any = torch.cuda  # tests put another in its place, that only notes what is asked
_streams: dict[torch.device, Any] = {}  # the side stream of each device: messages keep their order


def callers_stream() -> AbstractContextManager[Any]:
    """A block for another thread, in which it uses the GPU and the stream of the caller.

    A new thread would use the first GPU's default stream, which does not wait for the caller's.
    """
    if not cuda.is_initialized():  # no GPU has been used
        return nullcontext()
    return cuda.stream(cuda.current_stream(None))


class Beside:
    """One message. Made where ``xs`` are ready, on the program's stream of ``device``."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ready = cuda.current_stream(device).record_event()
        self._done: Any = None

    @classmethod
    def of(cls, xs: Sequence[Tensor]) -> Beside | None:
        """The side stream for the GPU of these tensors; None if none of them is on a GPU."""
        device = next((x.device for x in xs if x.device.type == "cuda"), None)
        return None if device is None else cls(device)

    def run(self, send: Run, xs: list[Tensor]) -> list[Tensor]:
        """``send(xs)`` on the side stream, in whichever thread this is called."""
        with cuda.device(self._device):
            if self._device not in _streams:
                # Urgent: copies behind a product's blocks would keep all other ranks waiting.
                _streams[self._device] = cuda.Stream(self._device, priority=-1)
            side = _streams[self._device]
            side.wait_event(self._ready)
            with cuda.stream(side):
                made = send(xs)
            for x in xs:
                x.record_stream(side)
            self._done = side.record_event()
        return made

    def join(self, made: Sequence[Tensor] = ()) -> None:
        """Let the program's stream wait for the message, once ``run`` has returned; it may then
        read ``made``."""
        if self._done is None:  # it has failed, and who asks for its result is told
            return
        now = cuda.current_stream(self._device)
        now.wait_event(self._done)
        for x in made:
            x.record_stream(now)
