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


class Beside:
    """One message that runs on a side stream of ``device``, in parallel with computation.

    Create it on the program's stream when the tensors to send are ready there: it records an event
    for which the side stream waits.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ready = cuda.current_stream(device).record_event()
        self._done: Any = None

    @classmethod
    def of(cls, xs: Sequence[Tensor]) -> Beside | None:
        """Return a ``Beside`` for the GPU that ``xs`` are on; None if no tensor is on a GPU."""
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
            side.wait_event(self._ready)
            with cuda.stream(side):
                made = send(xs)
            for x in xs:
                # Else the allocator could reuse the memory of x while the side stream still reads
                # it.
                x.record_stream(side)
            self._done = side.record_event()
        return made

    def join(self, made: Sequence[Tensor] = ()) -> None:
        """Let the program's stream wait for the message; it may then read ``made``.

        Call it once ``run`` has returned.
        """
        if self._done is None:  # `run` failed; the error is raised where its result is asked for
            return
        now = cuda.current_stream(self._device)
        now.wait_event(self._done)
        for x in made:
            x.record_stream(now)
