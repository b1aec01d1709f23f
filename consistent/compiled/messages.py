"""The transport of a step that is recorded: it passes messages on, and notes each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import Done, Handle, Ranks, Transport
from mirrored.transports.base.unseen import unseen
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.default import current

from ..nn.nested import map_tensors, tensors_in
from .errors import CannotRecord
from .opaque import Call, shape_of

# (call, tensors, results)
Note = Callable[[Call, list[Tensor], list[Tensor]], None]


class Noting(Wrapper):
    """Passes every call on to ``inner``, and gives those that send tensors to ``note``."""

    def __init__(self, inner: Transport, note: Note, reduced: Callable[[Call, Tensor], None]):
        super().__init__(inner)
        self._note, self._reduced = note, reduced

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in ("shares", "link", "gather_objects", "abandon"):
            with unseen():
                return super().pass_on(name, *args, **kwargs)
        if name not in _SENDING:
            raise CannotRecord(
                f"{name}: a step of one program does not send between stages.\n"
                "  Stages are run by consistent.nn.pipeline, or by nn.Graph with micro-batches."
            )
        places = kwargs.pop("out", None)
        given = tensors_in((args, kwargs))
        if name == "broadcast" and args and args[0] is None:
            given = []
        call = _Passed(name, args, kwargs)
        with unseen():
            results = [x.contiguous() for x in _listed(getattr(self.inner, name)(*args, **kwargs))]
        outs = tuple(map(shape_of, results))
        self._note(Call(call.text(), call, outs), given, results)
        made: Any = results if name in _LISTS else results[0]
        if places is None:
            return made
        return [place.copy_(x) for place, x in zip(places, made, strict=True)]

    # These take a list to be filled by position.

    def all_gather(
        self, x: Tensor, shapes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("all_gather", x, shapes, ranks, out=out)

    def all_to_all(
        self, pieces: Any, shapes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("all_to_all", pieces, shapes, ranks, out=out)

    def join_several(
        self, xs: Any, dims: Any, sizes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("join_several", xs, dims, sizes, ranks, out=out)

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        return Transport.all_reduce(self, x, ranks, op)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        if len(ranks) == 1 or x.numel() == 0:
            return Done(x)
        call = Call(f"all_reduce {ranks} {op}", _Reduced(ranks, op), ())
        with unseen():
            _reduce_into(self.inner, x, ranks, op)
        self._reduced(call, x)
        return Done(x)

    # What lets a rank read the others' memory is done by messages.
    peers = Transport.peers
    addends = Transport.addends


_LISTS = ("all_gather", "all_to_all", "exchange", "join_several", "reduce_scatter_several")
_SENDING = (*_LISTS, "join", "reduce_scatter", "turn", "broadcast")


class _Passed:
    """A call of the transport in use, with other tensors."""

    def __init__(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.name = name
        self._given = map_tensors((args, kwargs), lambda _: _HOLE)

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        left = iter(xs)
        args, kwargs = _fill(self._given, left)
        return [x.contiguous() for x in _listed(getattr(current(), self.name)(*args, **kwargs))]

    def text(self) -> str:
        """Its name and all that is no tensor."""
        return f"{self.name} {self._given!r}"


class _Reduced:
    """An all-reduce in place."""

    def __init__(self, ranks: Ranks, op: str) -> None:
        self._ranks, self._op = ranks, op

    def __call__(self, x: Tensor) -> None:
        _reduce_into(current(), x, self._ranks, self._op)


def _reduce_into(transport: Transport, x: Tensor, ranks: Ranks, op: str) -> None:
    x = x.detach()
    made = transport.all_reduce_async(x, ranks, op).wait()
    if made.data_ptr() != x.data_ptr():
        x.copy_(made)


class _Hole:
    def __repr__(self) -> str:
        return "x"


_HOLE = _Hole()


def _fill(value: Any, left: Any) -> Any:
    if value is _HOLE:
        return next(left)
    if isinstance(value, dict):
        return {key: _fill(x, left) for key, x in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_fill(x, left) for x in value)
    return value


def _listed(made: Any) -> list[Tensor]:
    return list(made) if isinstance(made, list | tuple) else [made]
