"""Transport wrapper that is in use while a step is recorded: it forwards messages and records each
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import Done, Handle, Ranks, Transport
from mirrored.transports.base.unseen import unseen
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.counting import call_of, counting, given_to
from mirrored.transports.default import current

from ..spec.nested import map_tensors, tensors_in
from .agreeing import SumAndTell
from .opaque import OpaqueCall, put, shape_of

# (call, tensors, results)
Note = Callable[[OpaqueCall, list[Tensor], list[Tensor]], None]
Reducing = Callable[[OpaqueCall, Tensor], None]


_NOT_IN_A_PROGRAM = frozenset(
    "shares link hosts_of bytes_by_messages gather_objects gather_notes abandon".split()
)


class Noting(Wrapper):
    """Transport that forwards every call to ``inner``, and records those that send tensors.

    Args:
        note: called with (call, sent tensors, results) for each message.
        start, wait: called with (call, tensor) when an in-place all-reduce starts, and when it is
            waited for.
        refuse: called with the reason if a call cannot be part of a program.
        tells: called with ranks before a sum; returns whether these ranks exchange errors in the
            message of the sum (``agreeing.py``).
    """

    records = True

    def __init__(
        self,
        inner: Transport,
        note: Note,
        start: Reducing,
        wait: Reducing,
        refuse: Callable[[str], None],
        tells: Callable[[Ranks], bool],
    ) -> None:
        super().__init__(inner)
        self._tells = tells
        self._note, self._start, self._wait = note, start, wait
        self._count, self._refuse = 0, refuse

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _NOT_IN_A_PROGRAM:
            with unseen():
                return super().pass_on(name, *args, **kwargs)
        if name not in _SENDING:
            self._refuse(
                f"{name}: a step of one program does not send between stages.\n"
                "  Stages are run by consistent.nn.pipeline, or by nn.Graph with micro-batches."
            )
            return super().pass_on(name, *args, **kwargs)
        places = kwargs.pop("out", None)
        given = given_to(name, args, kwargs)
        if len(given["ranks"]) == 1:  # nothing is sent: the ops inside are recorded as ops
            more = {} if places is None else {"out": places}
            return getattr(self.inner, name)(*args, **kwargs, **more)
        counted = call_of(self.rank, given, name)
        passed = _Passed(name, args, kwargs)
        with unseen():
            results = [x.contiguous() for x in _listed(getattr(self.inner, name)(*args, **kwargs))]
        call = OpaqueCall(
            passed.text(),
            passed,
            tuple(map(shape_of, results)),
            name,
            given.get("op", "sum" if "reduce" in name else ""),
            counted.ranks,
            counted.bytes,
            _own_part(self.rank, given) if name == "all_gather_into_tensor" else None,
            _gathered(name, given),
        )
        self._note(call, tensors_in((args, kwargs)), results)
        made: Any = results if name in _LISTS else results[0]
        if places is None:
            return made
        return [place.copy_(x) for place, x in zip(places, made, strict=True)]

    # Callers may pass ``out`` by position, and ``pass_on`` expects it as a keyword.

    def all_gather(
        self, x: Tensor, shapes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("all_gather", x, shapes, ranks, out=out)

    def all_to_all(
        self, pieces: Any, shapes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("all_to_all", pieces, shapes, ranks, out=out)

    def all_gather_several(
        self, xs: Any, dims: Any, sizes: Any, ranks: Ranks, out: Sequence[Tensor] | None = None
    ) -> list[Tensor]:
        return self.pass_on("all_gather_several", xs, dims, sizes, ranks, out=out)

    def all_reduce_async(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Handle:
        if len(ranks) == 1 or x.numel() == 0:
            return Done(x)
        given = {"x": x, "ranks": ranks}
        sent = call_of(self.rank, given, "all_reduce_async").bytes
        self._count += 1  # part of the text, so a start and its wait share one call number
        text = f"all_reduce {ranks} {op} {self._count}"
        call = OpaqueCall(text, _Started(ranks, op), (), "all_reduce", op, tuple(ranks), sent)
        with unseen():
            under_way = self.inner.all_reduce_async(x.detach(), ranks, op)
        self._start(call, x)
        return _Noted(call, x, under_way, self._wait)

    def as_one(
        self, run: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor], ranks: Ranks
    ) -> list[Tensor]:
        with unseen(), counting(self.inner) as sent:
            results = [x.contiguous() for x in run(xs)]
        outs = tuple(map(shape_of, results))
        call = OpaqueCall(repr(run), run, outs, "as_one", "", tuple(ranks), sent.bytes)
        self._note(call, xs, results)
        return results

    # While recording, the base class runs these as plain messages; the pass ``overlap`` starts
    # messages of a program early.
    overlaps = Transport.overlaps
    start_all_gather_several = Transport.start_all_gather_several
    start_reduce_scatter_several = Transport.start_reduce_scatter_several
    start_all_to_all = Transport.start_all_to_all

    def all_reduce_with_notes(
        self, x: Tensor, ranks: Ranks, told: Ranks, op: str = "sum"
    ) -> tuple[list[bytes], Tensor | None]:
        # A program exchanges errors too (agreeing.py): in this message, or, if ``_tells`` is false,
        # in the ``Agreed`` messages before it.
        if len(ranks) == 1 or not self._tells(told):
            return Transport.all_reduce_with_notes(self, x, ranks, told, op)
        with unseen():
            notes, total = self.inner.all_reduce_with_notes(x, ranks, told, op)
        if total is not None:
            sent = call_of(self.rank, {"x": x, "ranks": ranks}, "all_reduce").bytes
            self._note(SumAndTell(ranks, told, op).call(total, sent), [x], [total])
        return notes, total

    # Reads of other ranks' memory are recorded as messages, which the base class sends.
    peers = Transport.peers
    addends = Transport.addends


_LISTS = ("all_gather", "all_to_all", "exchange", "all_gather_several", "reduce_scatter_several")
_SENDING = (
    *_LISTS, "all_reduce", "all_gather_into_tensor", "reduce_scatter", "all_to_all_single",
    "broadcast",
)  # fmt: skip


def _gathered(name: str, given: dict[str, Any]) -> tuple[tuple, ...]:
    if name == "all_gather_into_tensor":
        dims, sizes = [given["dim"] % given["x"].dim()], [given["sizes"]]
    elif name == "all_gather_several":
        dims, sizes = given["dims"], given["sizes"]
    else:
        return ()
    ranks = tuple(given["ranks"])
    return tuple((dim, tuple(size), ranks) for dim, size in zip(dims, sizes, strict=True))


def _own_part(rank: int, given: dict[str, Any]) -> tuple[int, int, int]:
    sizes, me = given["sizes"], given["ranks"].index(rank)
    dim = given["dim"] % given["x"].dim()
    return dim, sum(sizes[:me]), sizes[me]


class _Passed:
    """Recorded call of a transport method, which a program repeats with other tensors.

    Args:
        name: the method, such as "all_gather".
        args, kwargs: its arguments, which are stored with placeholders instead of the tensors.
    """

    def __init__(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.name = name
        self._given = map_tensors((args, kwargs), lambda _: _HOLE)

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        left = iter(xs)
        args, kwargs = _fill(self._given, left)
        return [x.contiguous() for x in _listed(getattr(current(), self.name)(*args, **kwargs))]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the call by name, with placeholders for tensors."""
        return given_to(self.name, *self._given)

    def text(self) -> str:
        """Return the call as text that identifies it, with placeholders for tensors."""
        return f"{self.name} {self._given!r}"


class _Started:
    """Callable that starts a recorded in-place all-reduce; a later op of the program waits for it.

    Called with a tensor, it starts the all-reduce of that tensor, and returns the work handle.
    """

    def __init__(self, ranks: Ranks, op: str) -> None:
        self._ranks, self._op = ranks, op

    def __call__(self, x: Tensor) -> Handle:
        return current().all_reduce_async(x.detach(), self._ranks, self._op)


class _Noted:
    """Handle that a step gets for an asynchronous all-reduce while it is recorded.

    Its ``wait()`` waits for the handle ``inner`` of the transport, and records the wait by
    ``note``.
    """

    def __init__(self, call: OpaqueCall, x: Tensor, inner: Handle, note: Reducing) -> None:
        self._call, self._x, self._note = call, x, note
        self._inner: Handle | None = inner

    def wait(self) -> Tensor:
        if self._inner is not None:
            with unseen():
                put(self._inner.wait(), self._x)
            self._note(self._call, self._x)
            self._inner = None
        return self._x


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
