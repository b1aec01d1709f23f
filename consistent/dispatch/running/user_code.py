"""Code of the user's that every rank of a placement runs on whole, plain tensors.

It may do whatever a program may: compute with global tensors that it reaches, call modules, read
values, draw random numbers, differentiate. What it needs to know about itself is here.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from mirrored.transports.default import current
from mirrored.transports.outside import Outside

from ...forms.random import generator
from ...forms.random.generator import RngState
from ...forms.random.plain_draws import alike
from ...movement.differentiable import gather
from ...movement.world import apart, is_apart
from ...spec import Placement
from ..plans.arguments import with_tensors
from ..plans.shards import is_global, plain


class Scene(NamedTuple):
    """One call of such code, forward and backward.

    Attributes:
        name: of what is called.
        placement: its ranks run the code.
        key: what its plain random numbers are drawn by.
        is_followed: there are ranks that do not run it, and are told what came out.
        is_recorded: it is run once on ``meta`` tensors, by a rank that records a program.
    """

    name: str
    placement: Placement
    key: RngState
    is_followed: bool
    is_recorded: bool


def begin(name: str, placement: Placement) -> Scene:
    """The call of ``name`` that comes now. It counts as one random op, whether it draws or not, so
    that ranks outside ``placement`` keep count."""
    key, transport = generator.get_state(), current()
    generator.advance_to(key.counter + 1)
    is_recorded = isinstance(transport, Outside)
    others = placement.size < transport.size and not is_apart()
    return Scene(name, placement, key, others and not is_recorded, is_recorded)


class _Thread(threading.local):
    scene: Scene | None = None


_thread = _Thread()


@contextmanager
def running(scene: Scene, time: int = 0) -> Iterator[None]:
    """Inside, the code of ``scene`` runs, for the ``time``-th time."""
    before, _thread.scene = _thread.scene, scene
    try:
        with alike(scene.name, scene.placement, scene.key, time), apart(scene.is_followed):
            yield
    finally:
        _thread.scene = before


def present() -> Scene | None:
    """The call that this thread is inside of, if any."""
    return _thread.scene


def write_into_plain(function: Any, args: tuple, kwargs: dict, tensors: Sequence[Any]) -> Any:
    """An op that writes into its plain first operand: torch's own, given the whole values of the
    global ones."""
    whole = [gather(plain(t), t._spec) if is_global(t) else t for t in tensors]
    args, kwargs = with_tensors(args, kwargs, whole)
    return function(*args, **kwargs)
