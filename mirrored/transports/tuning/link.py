"""Cost of messages between the ranks of this world and of local copies, from the stored table.

Plans are chosen by this cost, so all ranks must use the same numbers: those of the rank that
requests them first.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import astuple
from functools import lru_cache
from typing import Protocol

from ...comm import Link
from . import table


class TextAgreement(Protocol):
    """Protocol of an object that gives all ranks the text of whichever rank requests it first.

    ``agreed_link`` uses it to give all ranks the same cost of messages. ``TorchDist`` implements
    it, and exchanges the text through torch.distributed's store, so no rank waits for another.
    """

    def agreed(self, name: str, make: Callable[[], str]) -> str: ...


def agreed_link(world: TextAgreement, kind: str, own: Callable[[], Link | None]) -> Link | None:
    """Return the cost of messages between devices of type ``kind``, the same on every rank.

    It is the result of ``own()`` on the rank that requests it first; ``world`` passes it to the
    others. Later calls return the cached result.
    """

    def make() -> str:
        own_link = own()
        return json.dumps(None if own_link is None else astuple(own_link))

    return _parse_link(world.agreed(f"link/{kind}", make))


def stored_link(size: int, device: str, memory_is_shared: bool) -> Link | None:
    """Return the cost from the table stored on this machine for ``size`` ranks on ``device``.

    ``device`` is a GPU's model, or ``cpu_device_name()`` for the CPU. Without a stored table it is
    the built-in cost. Returns None for one rank, for ranks that share no memory, and on several
    hosts.
    """
    # Without torchrun's variable, assume that all ranks are on this host.
    one_host = int(os.environ.get("LOCAL_WORLD_SIZE", size)) == size
    if size == 1 or not (memory_is_shared and one_host):
        return None
    return (table.load(size, device) or table.Table()).link


@lru_cache
def _parse_link(text: str) -> Link | None:
    values = json.loads(text)
    return None if values is None else Link(*values)
