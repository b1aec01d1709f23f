"""``flow.scope``: context managers for the placement on which ops run, and for the view of jobs.

The view says whether a job takes and returns whole batches or lists with one part per device.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Literal

from ..spec import Placement
from ..tensor.making.scope import placement_scope
from . import config

ViewName = Literal["consistent", "mirrored"]

_placements: list[Placement] = []
_views: list[ViewName] = []


class PlacementScope:
    """Context manager inside which ops run on a placement; of several scopes, the innermost counts.

    Programs write ``with scope.placement("cpu", "0:1"):``.
    """

    def __init__(self, placement: Placement):
        self.placement = placement
        # A stack: a scope may be entered again inside itself.
        self._scopes: list[AbstractContextManager] = []

    def __enter__(self) -> Placement:
        _placements.append(self.placement)
        self._scopes.append(placement_scope(self.placement))
        return self._scopes[-1].__enter__()

    def __exit__(self, *_: object) -> None:
        _placements.pop()
        self._scopes.pop().__exit__(None, None, None)


class View:
    """Choice of what a job takes and returns: whole batches, or a list with a part per device.

    It is passed to ``function_config().default_logical_view``, or entered as a context manager
    around calls of jobs.
    """

    def __init__(self, name: ViewName):
        self.name: ViewName = name

    def __enter__(self) -> View:
        _views.append(self.name)
        return self

    def __exit__(self, *_: object) -> None:
        _views.pop()

    def __repr__(self) -> str:
        return f"scope.{self.name}_view()"


def consistent_view() -> View:
    """Return the view in which a job takes and returns whole batches.

    In the job's function the batches are global tensors, split over the devices.
    """
    return View("consistent")


def mirrored_view() -> View:
    """Return the view in which a job takes and returns lists with one part per device.

    Each device has a copy of the model's variables, and gradients are averaged.
    """
    return View("mirrored")


def placement(device_tag: str, machine_device_ids: str | Sequence[str]) -> PlacementScope:
    """Return a context manager inside which ops run on the devices ``machine_device_ids``.

    Devices are written ``"machine:device"`` or ``"machine:first-last"``, counted from 0, or as a
    list of such texts: ``"0:0-3"`` are the first four devices of the first machine. ``device_tag``
    is "gpu" (or "cuda") or "cpu".

    Raises:
        ValueError: the text is not of that form, or the launcher started no such rank.
    """
    texts = [machine_device_ids] if isinstance(machine_device_ids, str) else machine_device_ids
    kind = "cuda" if device_tag == "gpu" else device_tag
    return PlacementScope(Placement(kind, [rank for text in texts for rank in _parse_ranks(text)]))


def current_placement() -> Placement | None:
    """Return the innermost placement that was entered, or None."""
    return _placements[-1] if _placements else None


def current_view() -> ViewName | None:
    """Return the innermost view that was entered, or None."""
    return _views[-1] if _views else None


def _parse_ranks(text: str) -> range:
    match = re.fullmatch(r"(\d+):(\d+)(?:-(\d+))?", text)
    if match is None:
        raise ValueError(
            f"scope.placement: {text!r} names no devices.\n"
            "  They are written machine:device or machine:first-last, counted from 0.\n"
            '  Write "0:1" for the second device of the first machine, "0:0-3" for its first four.'
        )
    machine, first, last = int(match[1]), int(match[2]), int(match[3] or match[2])
    machines, machine_ranks = config.machines(), config.ranks_per_machine()
    if machine >= machines or last >= machine_ranks or last < first:
        raise ValueError(
            f"scope.placement: {text!r} names machine {machine}, devices {first} to {last}, and "
            "the program runs "
            f"on {machines} machines (from 0) of {machine_ranks} ranks each (from 0).\n"
            "  Each device is driven by one rank, which the launcher starts.\n"
            "  Name devices that are there, or start more: --nnodes, --nproc_per_node."
        )
    return range(machine * machine_ranks + first, machine * machine_ranks + last + 1)
