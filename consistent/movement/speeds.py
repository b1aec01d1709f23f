"""The cost model of the ranks of this program: built-in figures, with measured links.

| what is decided | by the figures of |
| --- | --- |
| the layouts of an op, and the moves that lead to them | ``cost_model/built_in.py`` only |
| sizes and numbers of messages, fusions of a compiled step | ``device_speeds`` |
| layouts that a program asks to be searched for | ``costs_of_plans`` |

The transport measures the links. The last two rows differ in a simulation only. There a program
must run as it would on real ranks, whose transport measures no more than links; a search may use
all that is known of the simulated machine.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache

from mirrored.comm import Link
from mirrored.transports.default import current

from ..cost_model.built_in import BUILT_IN
from ..cost_model.messages import Wire
from ..cost_model.model import CostModel

_simulated: CostModel | None = None


def device_speeds(device_type: str) -> CostModel:
    """Return the cost model of the ranks of this world: built-in figures, with measured links.

    It is the same on every rank. Where nothing was measured, it has the built-in figures only.
    """
    link = current().link(device_type)
    return BUILT_IN[device_type] if link is None else speeds_of(device_type, link)


@lru_cache
def speeds_of(device_type: str, link: Link) -> CostModel:
    """Return the built-in cost model with the measured ``link`` in place of its own."""
    built_in = BUILT_IN[device_type]
    wire = Wire(0.0, link.bytes_per_s)
    return replace(
        built_in,
        message_start_s=link.latency_s,
        inside=wire,
        between=wire,
        launch_seconds=built_in.overhead if link.copy_start_s is None else link.copy_start_s,
        memory_bytes_per_s=built_in.memory
        if link.copy_bytes_per_s is None
        else link.copy_bytes_per_s,
    )


def costs_of_plans(device_type: str) -> CostModel:
    """Return the cost model by which layouts are searched.

    In a simulation of a machine with devices of this type it is the cost model of that machine,
    otherwise it is that of ``device_speeds``.
    """
    if _simulated is not None and _simulated.device_type == device_type:
        return _simulated
    return device_speeds(device_type)


@contextmanager
def simulated_costs(machine: CostModel) -> Iterator[None]:
    """Make ``costs_of_plans`` return ``machine``, which is simulated, inside the context."""
    global _simulated
    before, _simulated = _simulated, machine
    try:
        yield
    finally:
        _simulated = before


def start_bytes(device_type: str) -> int:
    """Return the bytes that a rank could send in the time that starting one more message takes.

    By it the library decides into how many messages to divide what it sends.
    """
    costs = device_speeds(device_type)
    return int((costs.latency + costs.python) * costs.bandwidth)
