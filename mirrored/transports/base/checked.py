"""Base class of transports that checks the arguments of each call before anything is sent.

It also carries out the calls that need no other rank.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...comm import (
    CompletedHandle,
    Handle,
    Ranks,
    Shape,
    Transport,
    check_member,
    check_op,
    placeholder_like,
)
from .unseen import hidden_from_modes


class CheckedTransport(Transport):
    """Transport whose subclasses implement only the eight methods with an underscore.

    These methods reach other ranks. They are called for two or more ranks, with detached tensors,
    and fill the ``out`` tensors, which are contiguous. ``_reduce``, ``_all_gather`` and
    ``_broadcast`` are not called if all tensors are empty.
    """

    @abstractmethod
    def _reduce(self, x: Tensor, ranks: Ranks, op: str) -> Handle:
        """Start to reduce ``x`` over ``ranks`` by ``op``; the method may overwrite ``x``."""

    @abstractmethod
    def _all_gather(self, x: Tensor, out: Sequence[Tensor], ranks: Ranks) -> None: ...

    @abstractmethod
    def _all_to_all(
        self, pieces: Sequence[Tensor], out: Sequence[Tensor], ranks: Ranks
    ) -> None: ...

    @abstractmethod
    def _broadcast(self, x: Tensor, source: int, ranks: Ranks) -> None:
        """Fill the contiguous ``x`` of every rank with that of world rank ``source``."""

    @abstractmethod
    def _exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        out: Sequence[tuple[int, Tensor]],
        ranks: Ranks,
        device: torch.device,
    ) -> None:
        """Send ``sends``, pairs (receiver, tensor), and fill ``out``, pairs (sender, tensor).

        No peer is this rank, and no tensor is empty.
        """

    @abstractmethod
    def _send(self, x: Tensor, to: int, label: str) -> Handle:
        """Start sending ``x``, which is contiguous and not empty, to another rank."""

    @abstractmethod
    def _receive(self, out: Tensor, source: int, label: str) -> Handle:
        """Start filling ``out``, which is not empty, from another rank; ``wait()`` returns it."""

    @abstractmethod
    def _gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]: ...

    def check(self, what: str, ranks: Ranks, *tensors: Tensor) -> int:
        """Return this rank's position in ``ranks``; every call does this first.

        Raises ValueError if this rank is not in ``ranks`` or one of ``tensors`` cannot be sent.
        ``what`` is the name of the call, for the message. A subclass may refuse more.
        """
        return check_member(what, self.rank, ranks, *tensors)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        self.check("all_reduce", ranks, x)
        check_op(op, x.dtype)
        x = x.detach()
        if len(ranks) == 1 or x.numel() == 0:
            return CompletedHandle(x)
        return self._reduce(x, ranks, op)

    def all_gather(
        self, x: Tensor, shapes: Sequence[Shape], ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        position = self.check("all_gather", ranks, x)
        check_shapes("all_gather: x", [x.shape], [shapes[position]])
        pieces = _outputs(x, shapes, out)
        if len(ranks) == 1:
            pieces[0].copy_(x.detach())
        # Every rank knows all shapes, so all of them skip an empty gather.
        elif any(map(math.prod, shapes)):
            self._all_gather(x.detach(), pieces, ranks)
        return pieces

    def all_to_all(
        self,
        pieces: Sequence[Tensor],
        shapes: Sequence[Shape],
        ranks: Ranks,
        out: Sequence[Tensor] | None = None,
    ) -> list[Tensor]:
        position = self.check("all_to_all", ranks, *pieces)
        check_shapes("all_to_all: own piece", [pieces[position].shape], [shapes[position]])
        received = _outputs(pieces[position], shapes, out)
        if len(ranks) == 1:
            received[0].copy_(pieces[0].detach())
        else:
            self._all_to_all([piece.detach() for piece in pieces], received, ranks)
        return received

    def broadcast(
        self,
        x: Tensor | None,
        shape: Shape,
        dtype: torch.dtype,
        device: torch.device | str,
        source: int,
        ranks: Ranks,
    ) -> Tensor:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.check("broadcast", ranks, out)
        check_member("broadcast from source", source, ranks)
        if source == self.rank:
            assert x is not None, "broadcast: the source gives x"
            self.check("broadcast", ranks, x)
            check_shapes("broadcast: x", [x.shape], [shape])
            out.copy_(x.detach())
        if len(ranks) > 1 and out.numel():
            self._broadcast(out, source, ranks)
        return out

    def exchange(
        self,
        sends: Sequence[tuple[int, Tensor]],
        receives: Sequence[tuple[int, Shape, torch.dtype]],
        ranks: Ranks,
        device: torch.device | str = "cpu",
    ) -> list[Tensor]:
        own_rank = self.rank
        out = [
            torch.empty(tuple(shape), dtype=dtype, device=device) for _, shape, dtype in receives
        ]
        self.check("exchange", ranks, *(x for _, x in sends), *out)
        # Messages of a rank to itself are copied here, and match in order as well.
        own_messages = iter([x for peer, x in sends if peer == own_rank])
        for (peer, _, _), x in zip(receives, out, strict=True):
            if peer == own_rank:
                x.copy_(next(own_messages).detach())
        outgoing = [(peer, x.detach()) for peer, x in sends if peer != own_rank and x.numel()]
        incoming = [
            (peer, x)
            for (peer, _, _), x in zip(receives, out, strict=True)
            if peer != own_rank and x.numel()
        ]
        if len(ranks) > 1:
            self._exchange(outgoing, incoming, ranks, torch.device(device))
        return out

    def send(self, x: Tensor, to: int, label: str) -> Handle:
        self.check("send", (self.rank, to), x)
        x = x.detach().contiguous()
        return self._send(x, to, label) if x.numel() else CompletedHandle(placeholder_like(x))

    def receive(
        self, shape: Shape, dtype: torch.dtype, source: int, label: str, device: torch.device | str
    ) -> Handle:
        out = torch.empty(tuple(shape), dtype=dtype, device=device)
        self.check("receive", (self.rank, source), out)
        return self._receive(out, source, label) if out.numel() else CompletedHandle(out)

    def gather_objects(self, obj: Any, ranks: Ranks) -> list[Any]:
        self.check("gather_objects", ranks)
        return [obj] if len(ranks) == 1 else self._gather_objects(obj, ranks)

    def gather_notes(self, note: bytes, ranks: Ranks) -> list[bytes]:
        with hidden_from_modes():
            # First one byte each, since notes are nearly always empty; objects only if there is a
            # note.
            own_flag = torch.tensor([bool(note)], dtype=torch.uint8)
            flags = self.all_gather(own_flag, [(1,)] * len(ranks), ranks)
            if not any(flag.item() for flag in flags):
                return [b""] * len(ranks)
            return self.gather_objects(note, ranks)


def check_shapes(what: str, shapes: Sequence[Shape], expected_shapes: Sequence[Shape]) -> None:
    """Raise ValueError if one of ``shapes`` differs from that in ``expected_shapes``.

    ``expected_shapes`` are those that the other ranks expect; ``what`` begins the message.
    """
    for a, b in zip(shapes, expected_shapes, strict=True):
        if tuple(a) != tuple(b):
            raise ValueError(
                f"{what} has shape {tuple(a)}, but {tuple(b)} was promised to the other ranks.\n"
                "  They would wait for bytes that never come.\n"
                "  Pass the shape this rank's piece has."
            )


def _outputs(like: Tensor, shapes: Sequence[Shape], out: Sequence[Tensor] | None) -> list[Tensor]:
    if out is not None:
        check_shapes("out", [x.shape for x in out], shapes)
        assert all(x.is_contiguous() for x in out), "out: the pieces must be contiguous"
        return list(out)
    return [torch.empty(tuple(s), dtype=like.dtype, device=like.device) for s in shapes]
