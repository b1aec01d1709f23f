"""Base class of a transport that wraps another one and passes calls on to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from ...comm import Ranks, Transport

F = TypeVar("F", bound=Callable[..., Any])


def _forwarding_method(method: F) -> F:
    """Return a method with the name of ``method`` that calls ``Wrapper.pass_on`` with that name."""
    name = method.__name__

    def forward(self: Wrapper, *args: Any, **kwargs: Any) -> Any:
        return self.pass_on(name, *args, **kwargs)

    forward.__name__, forward.__doc__ = name, method.__doc__
    return forward  # type: ignore[return-value]


class Wrapper(Transport):
    """Transport that passes every call on to ``inner``.

    Subclasses override single methods, or ``pass_on`` for all of them.
    """

    def __init__(self, inner: Transport) -> None:
        self.inner = inner

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def size(self) -> int:
        return self.inner.size

    def rank_in(self, placement: Any) -> int:
        return self.inner.rank_in(placement)

    def device(self, kind: str) -> torch.device:
        return self.inner.device(kind)

    def tune(self, ranks: Ranks) -> Any:
        """Measure which way of sending is fastest on this machine, and return the table of results.

        The command ``python -m mirrored.transports.tuning`` calls it. Transports with several ways
        of sending override it, and store the table on disk for later runs. By default nothing is
        measured, and the result is None. A collective over ``ranks``.
        """
        return None

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Call method ``name`` of ``inner`` and return its result.

        All methods that communicate go through this, so a subclass can count or time all calls by
        overriding it alone.
        """
        return getattr(self.inner, name)(*args, **kwargs)

    all_reduce = _forwarding_method(Transport.all_reduce)
    all_reduce_async = _forwarding_method(Transport.all_reduce_async)
    all_gather = _forwarding_method(Transport.all_gather)
    all_to_all = _forwarding_method(Transport.all_to_all)
    broadcast = _forwarding_method(Transport.broadcast)
    exchange = _forwarding_method(Transport.exchange)
    send = _forwarding_method(Transport.send)
    receive = _forwarding_method(Transport.receive)
    gather_objects = _forwarding_method(Transport.gather_objects)
    gather_notes = _forwarding_method(Transport.gather_notes)
    all_reduce_with_notes = _forwarding_method(Transport.all_reduce_with_notes)
    all_gather_into_tensor = _forwarding_method(Transport.all_gather_into_tensor)
    reduce_scatter = _forwarding_method(Transport.reduce_scatter)
    all_gather_several = _forwarding_method(Transport.all_gather_several)
    reduce_scatter_several = _forwarding_method(Transport.reduce_scatter_several)
    start_all_gather_several = _forwarding_method(Transport.start_all_gather_several)
    start_reduce_scatter_several = _forwarding_method(Transport.start_reduce_scatter_several)
    start_all_to_all = _forwarding_method(Transport.start_all_to_all)
    all_to_all_single = _forwarding_method(Transport.all_to_all_single)
    peers = _forwarding_method(Transport.peers)
    addends = _forwarding_method(Transport.addends)
    shares = _forwarding_method(Transport.shares)
    overlaps = _forwarding_method(Transport.overlaps)
    link = _forwarding_method(Transport.link)
    hosts_of = _forwarding_method(Transport.hosts_of)
    bytes_by_messages = _forwarding_method(Transport.bytes_by_messages)
    abandon = _forwarding_method(Transport.abandon)
