"""Messages between CPU memories, and the collectives that are built from them.

A message has a tag made from its collective, ranks, dtype and bytes, and from the description of
the call (``described.py``). So ranks whose calls do not fit never receive each other's messages.
"""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from functools import lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ...comm import Handle, Ranks, placeholder_like
from ..failures import count_failures
from .described import current_call
from .groups import world

Message = tuple[int, Tensor]  # (the rank that it goes to or comes from, the tensor)


class StartedMessages:
    """Started messages of one collective; ``wait()`` returns once all have arrived or left.

    Args:
        name: the name of the collective.
        x: a tensor that describes the collective in error messages.
        sends: (rank, tensor) pairs to send.
        out: (rank, tensor) pairs to receive from the rank into the tensor.
        ranks: the ranks of the collective, which are part of the messages' tags.
    """

    def __init__(
        self, name: str, x: Tensor, sends: Sequence[Message], out: Sequence[Message], ranks: Ranks
    ) -> None:
        self._call = name, x, ranks
        self._works: list[Any] = []
        self._staging_buffers: list[tuple[Tensor, Tensor]] = []  # (GPU tensor, CPU buffer for it)
        if sends or out:
            self._world = world()
            self._sockets = self._world.sockets_to(ranks)
            self._world.run_watched(name, x, ranks, partial(self._start, sends, out))

    def _start(self, sends: Sequence[Message], out: Sequence[Message]) -> None:
        name, _, ranks = self._call
        tag_parts = _shared_tag_parts(ranks)
        for source, y in out:
            buffer = y if y.is_cpu else torch.empty_like(y, device="cpu")
            if buffer is not y:
                self._staging_buffers.append((y, buffer))
            tag = _hash_of(name, y.dtype, y.nbytes, *tag_parts)
            self._works.append(self._sockets.receive(source, tag, buffer))
        for to, y in sends:
            tag = _hash_of(name, y.dtype, y.nbytes, *tag_parts)
            self._works.append(self._sockets.send(to, tag, y if y.is_cpu else y.cpu()))

    def wait(self) -> None:
        """Wait for the messages. Received tensors may not be read before this returns."""
        works, self._works = self._works, []
        if not works:
            return
        name, x, ranks = self._call
        self._world.run_watched(name, x, ranks, partial(self._sockets.wait, works))
        for y, buffer in self._staging_buffers:
            y.copy_(buffer)


def send_and_receive(
    name: str, x: Tensor, sends: Sequence[Message], out: Sequence[Message], ranks: Ranks
) -> None:
    """Send and receive messages of a collective and wait; arguments as ``StartedMessages``."""
    StartedMessages(name, x, sends, out, ranks).wait()


def start_all_to_all(
    name: str, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
) -> StartedMessages:
    """Start to send ``pieces[k]`` to ``ranks[k]`` and to receive ``out[k]`` from it: an all-to-all.

    ``name`` is that of the collective. Empty pieces are not sent, and this rank's own piece is left
    out.
    """
    n, position = len(ranks), ranks.index(world().rank)
    sends, receives = list[Message](), list[Message]()
    for step in range(1, n):  # the next rank first, so that not all send to the same one first
        k = (position + step) % n
        if pieces[k].numel():
            sends.append((ranks[k], pieces[k]))
        if out[k].numel():
            receives.append((ranks[k], out[k]))
    return StartedMessages(name, pieces[position], sends, receives, ranks)


def broadcast(x: Tensor, source: int, ranks: Ranks) -> None:
    """Fill ``x``, in CPU memory, with the ``x`` of ``source``, along a binary tree.

    ```
    rank     0   1   2   3   4   5        counted from the source
    step 1   0 ------------> 4            the distance is halved in each step
    step 2   0 ----> 2       4
    step 3   0 > 1   2 > 3   4 > 5
    ```
    """
    name, n, source_position = f"broadcast from rank {source}", len(ranks), ranks.index(source)
    offset = (ranks.index(world().rank) - source_position) % n
    span = 1 << (n - 1).bit_length()
    # The lowest set bit: the distance from the parent; children are at its halves.
    distance = offset & -offset if offset else span
    if offset:
        parent = ranks[(source_position + offset - distance) % n]
        send_and_receive(name, x, [], [(parent, x)], ranks)
    steps = [distance >> k for k in range(1, distance.bit_length())]
    children = [ranks[(source_position + offset + step) % n] for step in steps if offset + step < n]
    send_and_receive(name, x, [(child, x) for child in children], [], ranks)


def start_send(label: str, x: Tensor, to: int) -> Handle:
    """Start sending ``x`` to rank ``to`` under ``label``. A CUDA tensor is copied to the CPU first.

    ``wait()`` of the result returns a tensor that has only the shape and dtype of ``x``.
    """
    pair = (world().rank, to)
    wire = x.cpu()
    start = partial(world().sockets_to(pair).send, to, tag_of(label, x, pair), wire)
    work = world().run_watched(f"send of {label}", x, pair, start)
    sent_outline = placeholder_like(x)
    return _MessageHandle(f"send of {label}", work, sent_outline, sent_outline, pair)


def start_receive(label: str, out: Tensor, source: int) -> Handle:
    """Start filling ``out`` with what rank ``source`` sends under ``label``.

    ``wait()`` of the result returns ``out``.
    """
    pair = (source, world().rank)
    wire = out if out.is_cpu else torch.empty_like(out, device="cpu")
    start = partial(world().sockets_to(pair).receive, source, tag_of(label, out, pair), wire)
    work = world().run_watched(f"receive of {label}", out, pair, start)
    return _MessageHandle(f"receive of {label}", work, out, wire, pair)


class _MessageHandle:
    """Handle of one started message to or from another rank; ``wait()`` returns its tensor."""

    def __init__(self, name: str, work: Any, x: Tensor, wire: Tensor, pair: Ranks) -> None:
        self.name, self.work, self.x, self.wire, self.pair = name, work, x, wire, pair

    def wait(self) -> Tensor:
        wait = partial(world().sockets_to(self.pair).wait, [self.work])
        world().run_watched(self.name, self.x, self.pair, wait)
        if self.name.startswith("receive") and self.wire is not self.x:
            self.x.copy_(self.wire)
        return self.x


def as_bytes(x: Tensor) -> Tensor:
    """Return the bytes of ``x`` as a 1-d tensor, the form in which every dtype is sent.

    It shares memory with a contiguous ``x``.
    """
    x = x.resolve_conj().resolve_neg().contiguous()
    # A contiguous tensor may have any stride along a dim of size 1, and `view` would keep it.
    return x.as_strided((x.numel(),), (1,)).view(torch.uint8)


def tag_of(name: str, x: Tensor, ranks: Ranks) -> int:
    """Return the tag of a message of ``x``, a hash of all that its two ranks must agree on."""
    return _hash_of(name, x.dtype, x.nbytes, *_shared_tag_parts(ranks))


def _shared_tag_parts(ranks: Ranks) -> tuple[object, ...]:
    """Return what goes into the tags of all messages of the current call.

    It is the ranks, the description of the call and the count of failures. On all ranks that are
    at the same step of the program it is the same.
    """
    return ranks, current_call(), count_failures()


@lru_cache(1 << 12)
def _hash_of(*parts: object) -> int:
    return zlib.crc32(repr(parts).encode())
