"""Runs a message on a CUDA stream of its own, in parallel with the program's stream.

```
program's stream   make x | ready | compute ...               | wait for done | read the result
side stream                 wait for ready | message | done
```

The caching allocator must not reuse the memory of what is sent and received while either stream
works on it (``record_stream``). The rules are those of
https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-streams.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

Run = Callable[[list[Tensor]], list[Tensor]]

cuda: Any = torch.cuda  # tests replace it by a stub that records the calls
_streams: dict[torch.device, Any] = {}  # the side stream of each device: messages keep their order


def callers_stream() -> AbstractContextManager[Any]:
    """Return a context manager in which another thread uses this thread's GPU and stream.

    Create it in the caller, and enter it in the other thread, which would otherwise use the first
    GPU's default stream and not wait for work on the caller's stream.
    """
    if not cuda.is_initialized():  # no GPU has been used
        return nullcontext()
    return cuda.stream(cuda.current_stream(None))


class SideStreamMessage:
    """One message that runs on a side stream of ``device``, in parallel with computation.

    Create it on the program's stream when the tensors to send are ready there: it records an event
    for which the side stream waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ready_event = cuda.current_stream(device).record_event()
        self._done_event: Any = None

    @classmethod
    def for_tensors(cls, xs: Sequence[Tensor]) -> SideStreamMessage | None:
        """Return an object for a message from the GPU of ``xs``; None if none is on a GPU."""
        device = next((x.device for x in xs if x.device.type == "cuda"), None)
        return None if device is None else cls(device)

    def run(self, send: Run, xs: list[Tensor]) -> list[Tensor]:
        """Run ``send(xs)`` on the side stream once ``xs`` are ready, and return its results.

        Any thread may call it. The results may be read on the program's stream after ``join``.
        """
        with cuda.device(self._device):
            if self._device not in _streams:
                # High priority: a copy that is queued behind a matmul's blocks keeps all other
                # ranks waiting.
                _streams[self._device] = cuda.Stream(self._device, priority=-1)
            side = _streams[self._device]
            side.wait_event(self._ready_event)
            with cuda.stream(side):
                results = send(xs)
            for x in xs:
                # Else the allocator could reuse the memory of x while the side stream still reads
                # it.
                x.record_stream(side)
            self._done_event = side.record_event()
        return results

    def join(self, made: Sequence[Tensor] = ()) -> None:
        """Let the program's stream wait for the message; it may then read ``made``.

        Call it once ``run`` has returned.
        """
        if self._done_event is None:  # `run` failed; its result raises the error
            return
        current_stream = cuda.current_stream(self._device)
        current_stream.wait_event(self._done_event)
        for x in made:
            x.record_stream(current_stream)
