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
        if name in BYTE_COUNTERS:
            call = record_of(self.rank, arguments_by_name(name, args, kwargs), name)
            if len(call.ranks) > 1:
                self.calls.append(call)
        return super().pass_on(name, *args, **kwargs)


# ---- bytes that a rank sends, from its rank and the arguments of the method by name --------------

_ByteCounter = Callable[[int, dict[str, Any]], int]


def _ring_bytes(rank: int, arguments: dict[str, Any]) -> int:
    n = len(arguments["ranks"])
    return -(-2 * (n - 1) * arguments["x"].nbytes // n)


def _all_gather_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return arguments["x"].nbytes * (len(arguments["ranks"]) - 1)


def _broadcast_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return _all_gather_bytes(rank, arguments) if rank == arguments["source"] else 0


def _all_to_all_bytes(rank: int, arguments: dict[str, Any]) -> int:
    pieces = zip(arguments["pieces"], arguments["ranks"], strict=True)
    return sum(x.nbytes for x, to in pieces if to != rank)


def _exchange_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return sum(x.nbytes for to, x in arguments["sends"] if to != rank)


def _send_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return arguments["x"].nbytes


def _split_bytes(dim_name: str, sizes_name: str) -> _ByteCounter:
    """Return a function that counts the bytes that a rank sends when ``x`` is cut for all ranks.

    These are the bytes of ``x`` without this rank's own part.

    Args:
        dim_name: the argument with the dim along which ``x`` is cut.
        sizes_name: the argument with the sizes of the parts.
    """

    def count_bytes(rank: int, arguments: dict[str, Any]) -> int:
        x: Tensor = arguments["x"]
        size = x.shape[arguments[dim_name]]
        own_size = (
            arguments[sizes_name][arguments["ranks"].index(rank)]
            if rank in arguments["ranks"]
            else 0
        )
        return x.nbytes // max(size, 1) * (size - own_size)

    return count_bytes


def _split_several_bytes(rank: int, arguments: dict[str, Any]) -> int:
    count_bytes = _split_bytes("dim", "sizes")
    tensors = zip(arguments["xs"], arguments["dims"], arguments["sizes"], strict=True)
    return sum(
        count_bytes(rank, {"x": x, "dim": dim, "sizes": sizes, "ranks": arguments["ranks"]})
        for x, dim, sizes in tensors
    )


def _gather_several_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return sum(x.nbytes for x in arguments["xs"]) * (len(arguments["ranks"]) - 1)


def _note_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return len(arguments["note"]) * (len(arguments["ranks"]) - 1)  # headers and flags do not count


def _object_bytes(rank: int, arguments: dict[str, Any]) -> int:
    return len(pickle.dumps(arguments["obj"])) * (len(arguments["ranks"]) - 1)


# Method -> the name under which it counts, and the function that returns its bytes.
BYTE_COUNTERS: dict[str, tuple[str, _ByteCounter]] = {
    "all_reduce": ("all_reduce", _ring_bytes),
    "all_reduce_with_notes": ("all_reduce", _ring_bytes),
    "all_reduce_async": ("all_reduce", _ring_bytes),
    "all_gather": ("all_gather", _all_gather_bytes),
    "all_gather_into_tensor": ("all_gather", _all_gather_bytes),
    "peers": ("all_gather", _all_gather_bytes),
    "all_to_all": ("all_to_all", _all_to_all_bytes),
    "all_gather_several": ("all_gather", _gather_several_bytes),
    "reduce_scatter_several": ("all_to_all", _split_several_bytes),
    "start_all_gather_several": ("all_gather", _gather_several_bytes),
    "start_reduce_scatter_several": ("all_to_all", _split_several_bytes),
    "start_all_to_all": ("all_to_all", _all_to_all_bytes),
    "all_to_all_single": ("all_to_all", _split_bytes("split_dim", "split_sizes")),
    "reduce_scatter": ("all_to_all", _split_bytes("dim", "sizes")),
    "addends": ("all_to_all", _split_bytes("dim", "sizes")),
    "broadcast": ("broadcast", _broadcast_bytes),
    "exchange": ("exchange", _exchange_bytes),
    "send": ("send", _send_bytes),
    "gather_objects": ("gather_objects", _object_bytes),
    "gather_notes": ("gather_objects", _note_bytes),
}
_SIGNATURES = {name: inspect.signature(getattr(Transport, name)) for name in BYTE_COUNTERS}


def arguments_by_name(name: str, args: tuple, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call of the transport's method ``name``, by parameter name.

    Parameters that the caller left to their defaults are not included.
    """
    return dict(_SIGNATURES[name].bind(None, *args, **kwargs).arguments)


def record_of(rank: int, arguments: dict[str, Any], name: str) -> Call:
    """Return the record of a call of the method ``name`` with ``arguments``.

    ``rank`` is the calling rank. ``arguments`` maps parameter names to arguments, as
    ``arguments_by_name`` returns them.
    """
    # `send` has no `ranks`, only the receiver.
    ranks = tuple(arguments["ranks"]) if "ranks" in arguments else (rank, arguments["to"])
    counted_as, count_bytes = BYTE_COUNTERS[name]
    waits = not (name.startswith("start_") or name.endswith("_async"))
    nbytes = count_bytes(rank, arguments) if len(ranks) > 1 else 0
    return Call(counted_as, nbytes, ranks, waits, len(arguments.get("xs", (None,))))


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
