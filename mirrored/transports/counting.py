"""Counts what a rank sends, for tests and reports, by a wrapper around its transport.

A program that does not use it pays nothing.
"""

from __future__ import annotations

import inspect
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ..comm import Ranks, Transport
from .base.wrapper import Wrapper
from .default import current, replace_current


@dataclass(frozen=True)
class Call:
    """Record of one communication call.

    Attributes:
        name: the kind of collective, such as "all_gather".
        bytes: how many bytes this rank sends in it.
        ranks: the ranks that take part.
        waits: whether the caller waits for it at once; False if the call only starts it.
        tensors: how many tensors are sent together.
    """

    name: str
    bytes: int
    ranks: Ranks
    waits: bool = True
    tensors: int = 1


class Counting(Wrapper):
    """Wrapper that records every call in ``calls``, and passes it on to ``inner``.

    Bytes are those that this rank sends under the usual algorithm, with n ranks and x its own
    tensor: all_reduce ceil(2 (n-1)/n |x|) (a ring), all_gather (n-1) |x|, all_to_all and exchange
    the pieces for others, send |x|, broadcast (n-1) |x| at the source and 0 elsewhere. A
    reduce-scatter counts as the all-to-all of its parts.
    """

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.calls: list[Call] = []

    @property
    def bytes(self) -> int:
        """Number of bytes that this rank has sent in all calls."""
        return sum(call.bytes for call in self.calls)

    @property
    def names(self) -> list[str]:
        """Names of the calls, in order."""
        return [call.name for call in self.calls]

    def clear(self) -> None:
        """Forget the calls so far."""
        self.calls.clear()

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Record what this rank sends in a call of the method ``name``, and make the call."""
        if name in COUNTED:
            call = call_of(self.rank, given_to(name, args, kwargs), name)
            if len(call.ranks) > 1:
                self.calls.append(call)
        return super().pass_on(name, *args, **kwargs)


# ---- bytes that a rank sends, from its rank and the arguments of the method by name --------------

_Sent = Callable[[int, dict[str, Any]], int]


def _in_a_ring(rank: int, given: dict[str, Any]) -> int:
    n = len(given["ranks"])
    return -(-2 * (n - 1) * given["x"].nbytes // n)


def _to_all_others(rank: int, given: dict[str, Any]) -> int:
    return given["x"].nbytes * (len(given["ranks"]) - 1)


def _from_the_source(rank: int, given: dict[str, Any]) -> int:
    return _to_all_others(rank, given) if rank == given["source"] else 0


def _pieces_for_others(rank: int, given: dict[str, Any]) -> int:
    pieces = zip(given["pieces"], given["ranks"], strict=True)
    return sum(x.nbytes for x, to in pieces if to != rank)


def _messages_to_others(rank: int, given: dict[str, Any]) -> int:
    return sum(x.nbytes for to, x in given["sends"] if to != rank)


def _all_of_it(rank: int, given: dict[str, Any]) -> int:
    return given["x"].nbytes


def _parts_for_others(dim_name: str, sizes_name: str) -> _Sent:
    """Return a function that counts the bytes that a rank sends when ``x`` is cut for all ranks.

    These are the bytes of ``x`` without this rank's own part.

    Args:
        dim_name: the argument with the dim along which ``x`` is cut.
        sizes_name: the argument with the sizes of the parts.
    """

    def sent(rank: int, given: dict[str, Any]) -> int:
        x: Tensor = given["x"]
        size = x.shape[given[dim_name]]
        own = given[sizes_name][given["ranks"].index(rank)] if rank in given["ranks"] else 0
        return x.nbytes // max(size, 1) * (size - own)

    return sent


def _parts_of_several(rank: int, given: dict[str, Any]) -> int:
    sent = _parts_for_others("dim", "sizes")
    each = zip(given["xs"], given["dims"], given["sizes"], strict=True)
    return sum(
        sent(rank, {"x": x, "dim": dim, "sizes": sizes, "ranks": given["ranks"]})
        for x, dim, sizes in each
    )


def _several_to_all_others(rank: int, given: dict[str, Any]) -> int:
    return sum(x.nbytes for x in given["xs"]) * (len(given["ranks"]) - 1)


def _note(rank: int, given: dict[str, Any]) -> int:
    return len(given["note"]) * (len(given["ranks"]) - 1)  # headers and flags do not count


def _pickled(rank: int, given: dict[str, Any]) -> int:
    return len(pickle.dumps(given["obj"])) * (len(given["ranks"]) - 1)


# Method -> the name under which it counts, and the function that returns its bytes.
COUNTED: dict[str, tuple[str, _Sent]] = {
    "all_reduce": ("all_reduce", _in_a_ring),
    "all_reduce_with_notes": ("all_reduce", _in_a_ring),
    "all_reduce_async": ("all_reduce", _in_a_ring),
    "all_gather": ("all_gather", _to_all_others),
    "all_gather_into_tensor": ("all_gather", _to_all_others),
    "peers": ("all_gather", _to_all_others),
    "all_to_all": ("all_to_all", _pieces_for_others),
    "all_gather_several": ("all_gather", _several_to_all_others),
    "reduce_scatter_several": ("all_to_all", _parts_of_several),
    "start_all_gather_several": ("all_gather", _several_to_all_others),
    "start_reduce_scatter_several": ("all_to_all", _parts_of_several),
    "start_all_to_all": ("all_to_all", _pieces_for_others),
    "all_to_all_single": ("all_to_all", _parts_for_others("split_dim", "split_sizes")),
    "reduce_scatter": ("all_to_all", _parts_for_others("dim", "sizes")),
    "addends": ("all_to_all", _parts_for_others("dim", "sizes")),
    "broadcast": ("broadcast", _from_the_source),
    "exchange": ("exchange", _messages_to_others),
    "send": ("send", _all_of_it),
    "gather_objects": ("gather_objects", _pickled),
    "gather_notes": ("gather_objects", _note),
}
_SIGNATURES = {name: inspect.signature(getattr(Transport, name)) for name in COUNTED}


def given_to(name: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the transport's method ``name``, by parameter name.

    Parameters that the caller left to their defaults are not included.
    """
    return dict(_SIGNATURES[name].bind(None, *args, **kwargs).arguments)


def call_of(rank: int, given: dict[str, Any], name: str) -> Call:
    """Return the record of a call of the method ``name`` with the arguments ``given``.

    ``rank`` is the calling rank. ``given`` maps parameter names to arguments, as ``given_to``
    returns them.
    """
    # `send` has no `ranks`, only the receiver.
    ranks = tuple(given["ranks"]) if "ranks" in given else (rank, given["to"])
    counted_as, sent = COUNTED[name]
    waits = not (name.startswith("start_") or name.endswith("_async"))
    nbytes = sent(rank, given) if len(ranks) > 1 else 0
    return Call(counted_as, nbytes, ranks, waits, len(given.get("xs", (None,))))


@contextmanager
def counting(transport: Transport | None = None) -> Iterator[Counting]:
    """Record what this rank sends inside the ``with`` block.

    ```
    with counting() as log:
        y = x.to_global(sbp=B)
    assert log.names == ["all_gather"] and log.bytes == 64
    ```
    """
    log = Counting(transport or current())
    with replace_current(log):
        yield log
