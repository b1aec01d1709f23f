"""The transport of a rank that is in no placement, never communicates, and only follows."""

from __future__ import annotations

from typing import Any

from ..comm import Transport
from .base.checked import CheckedTransport


class Outside(CheckedTransport):
    """Rank -1. Every call that would send or receive raises RuntimeError(`why`).

    Messages are priced as they are for `inside`, so that the choices of layouts are its own.
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
