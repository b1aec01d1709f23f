"""Recorder of the memory that a real (not simulated) program holds, by the rules of the simulation,
to check simulated peaks against real ones."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ...spec.nested import tensors_in
from .log import Log
from .memory import Memory
from .peak_memory import peaks


class MemoryRecorder(TorchDispatchMode):
    """Torch dispatch mode that records the memory of all tensors that ops make.

    ```
    with MemoryRecorder() as recorder:
        step()
        recorder.reset_peak()
        step()
    print(recorder.peak)
    ```
    """

    def __init__(self) -> None:
        super().__init__()
        self._log = Log()
        self._memory = Memory(self._log)
        self._begin = 0

    def reset_peak(self) -> None:
        """Reset the peak to the bytes that are held now."""
        self._begin = len(self._log.events)

    @property
    def peak(self) -> int:
        """The most bytes that were held at once."""
        peak_of_ranks = peaks(self._log.events, self._begin, {})
        return peak_of_ranks[0].bytes if peak_of_ranks else 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        with torch._C.DisableTorchFunction():
            out = func(*args, **(kwargs or {}))
            for x in tensors_in(out):
                if torch.Tensor.device.__get__(x).type != "meta":  # type: ignore[attr-defined]
                    self._memory.register(x, 0)
            return out
