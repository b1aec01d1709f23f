"""Transport for a process that records or simulates a program without being one of its ranks."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ..comm import Ranks, Transport
from .base.checked import CheckedTransport


class Outside(CheckedTransport):
    """Transport of rank -1, outside every placement; communication raises RuntimeError(``why``).

    ``link`` and ``device`` are those of the transport ``inside``, so that messages are given the
    same cost and the same layouts are chosen.
    """

    rank: Any = -1
    size: Any = 1

    def __init__(self, inside: Transport, why: str, size: int = 1) -> None:
        self.link: Any = inside.link
        self.device: Any = inside.device
        self.size = size
        self.why = why

    def check(self, what: str, ranks: Ranks, *tensors: Tensor) -> int:
        """Raise RuntimeError(``why``): every call of a transport begins with this check."""
        raise RuntimeError(self.why)

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(self.why)

    _reduce: Any = _refuse
    _all_gather: Any = _refuse
    _all_to_all: Any = _refuse
    _broadcast: Any = _refuse
    _exchange: Any = _refuse
    _send: Any = _refuse
    _receive: Any = _refuse
    _gather_objects: Any = _refuse
