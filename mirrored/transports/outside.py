"""Transport of a rank outside every placement: it follows the program without communicating."""

from __future__ import annotations

from typing import Any

from ..comm import Transport
from .base.checked import CheckedTransport


class Outside(CheckedTransport):
    """Transport of rank -1; a call that would send or receive raises RuntimeError(``why``).

    ``link`` and ``device`` are those of ``inside``, so that messages have the same price and the
    same layouts are chosen.
    """

    rank: Any = -1
    size: Any = 1

    def __init__(self, inside: Transport, why: str, size: int = 1) -> None:
        self.link: Any = inside.link
        self.device: Any = inside.device
        self.size = size
        self._why = why

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError(self._why)

    _reduce: Any = _refuse
    _all_gather: Any = _refuse
    _all_to_all: Any = _refuse
    _broadcast: Any = _refuse
    _exchange: Any = _refuse
    _send: Any = _refuse
    _receive: Any = _refuse
    _gather_objects: Any = _refuse
