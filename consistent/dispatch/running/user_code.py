"""State of user code that every rank of a placement runs on whole, plain tensors.

Such code may do anything: compute with global tensors that it reaches, call modules, read values,
draw random numbers, differentiate. This module holds what the library must know about such a call.
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
from ...forms.random.plain_draws import same_draws
from ...movement.differentiable import gather
from ...movement.world import excludes_others, excluding_others
from ...spec import Placement
from ..plans.arguments import with_tensors
from ..plans.shards import is_global, plain


class UserCall(NamedTuple):
    """The context of one call of user code, kept for its forward and its backward.

    Attributes:
        name: name of the function that is called.
        placement: placement whose ranks run the code.
        key: random state that seeds the plain random numbers of the code.
        is_followed: whether some ranks do not run the code and are sent a description of its
            result.
        is_recorded: whether the code runs once on ``meta`` tensors, on a rank that records a
            program.
    """

    name: str
    placement: Placement
    key: RngState
    is_followed: bool
    is_recorded: bool


def begin_user_call(name: str, placement: Placement) -> UserCall:
    """Return the ``UserCall`` of a call of ``name`` that starts at this point of the program.

    The call counts as one random op, whether it draws or not, so that the counters of ranks outside
    ``placement`` stay equal.
    """
    key, transport = generator.get_state(), current()
    generator.advance_to(key.counter + 1)
    is_recorded = isinstance(transport, Outside)
    runs_on_some = placement.size < transport.size and not excludes_others()
    return UserCall(name, placement, key, runs_on_some and not is_recorded, is_recorded)


class _ThreadState(threading.local):
    user_call: UserCall | None = None


_thread = _ThreadState()


@contextmanager
def running_user_call(user_call: UserCall, time: int = 0) -> Iterator[None]:
    """Mark this thread as running the user code of ``user_call`` inside the context.

    ``time`` numbers the runs of the same code, which draw different random numbers: 0 for forward,
    then one more for each backward.
    """
    previous, _thread.user_call = _thread.user_call, user_call
    try:
        with (
            same_draws(user_call.name, user_call.placement, user_call.key, time),
            excluding_others(user_call.is_followed),
        ):
            yield
    finally:
        _thread.user_call = previous


def current_user_call() -> UserCall | None:
    """Return the ``UserCall`` of the user code that this thread is running, or None."""
    return _thread.user_call


def write_into_plain(function: Any, args: tuple, kwargs: dict, tensors: Sequence[Any]) -> Any:
    """Run an in-place op whose target, the first of ``tensors``, is plain, and stays so.

    Global operands are gathered, so that each rank writes the same values.
    """
    plain_tensors = [gather(plain(t), t._spec) if is_global(t) else t for t in tensors]
    args, kwargs = with_tensors(args, kwargs, plain_tensors)
    return function(*args, **kwargs)
