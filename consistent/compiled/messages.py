"""Transport wrapper that is in use while a step is recorded: it forwards messages and records each
of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from mirrored.comm import CompletedHandle, Handle, Ranks, Transport
from mirrored.transports.base.unseen import hidden_from_modes
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.counting import arguments_by_name, counting, record_of
from mirrored.transports.default import current

from ..spec.nested import map_tensors, tensors_in
from .agreeing import SumWithErrors
from .opaque import OpaqueCall, copy_unless_same_memory, shape_of

# (call, tensors, results)
MessageCallback = Callable[[OpaqueCall, list[Tensor], list[Tensor]], None]
ReduceCallback = Callable[[OpaqueCall, Tensor], None]


_UNRECORDED_METHODS = frozenset(
    "shares link hosts_of bytes_by_messages gather_objects gather_notes abandon".split()
)


class RecordingTransport(Wrapper):
    """Transport that forwards every call to ``inner``, and records those that send tensors.

    Args:
        on_message: called with (call, sent tensors, results) for each message.
        on_reduce_start, on_reduce_wait: called with (call, tensor) when an in-place all-reduce
            starts, and when it is waited for.
        give_up: called with the reason if a call cannot be part of a program.
        let_sum_carry_errors: called with ranks before a sum; returns whether these ranks exchange
            errors in the message of the sum (``agreeing.py``).
    """

    records = True

    def __init__(
        self,
        inner: Transport,
        on_message: MessageCallback,
        on_reduce_start: ReduceCallback,
        on_reduce_wait: ReduceCallback,
        give_up: Callable[[str], None],
        let_sum_carry_errors: Callable[[Ranks], bool],
    ) -> None:
        super().__init__(inner)
        self._let_sum_carry_errors = let_sum_carry_errors
        self._on_message, self._on_reduce_start, self._on_reduce_wait = (
            on_message,
            on_reduce_start,
            on_reduce_wait,
        )
        self._start_count, self._give_up = 0, give_up

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name in _UNRECORDED_METHODS:
            with hidden_from_modes():
                return super().pass_on(name, *args, **kwargs)
        if name not in _SENDING_METHODS:
            self._give_up(
                f"{name}: a step of one program does not send between stages.\n"
                "  Stages are run by consistent.nn.pipeline, or by nn.Graph with micro-batches."
            )
            return super().pass_on(name, *args, **kwargs)
        out_buffers = kwargs.pop("out", None)
        arguments = arguments_by_name(name, args, kwargs)
        if len(arguments["ranks"]) == 1:  # nothing is sent: the ops inside are recorded as ops
            out_keyword = {} if out_buffers is None else {"out": out_buffers}
            return getattr(self.inner, name)(*args, **kwargs, **out_keyword)
        call_info = record_of(self.rank, arguments, name)
        transport_call = _TransportCall(name, args, kwargs)
        with hidden_from_modes():
            results = [x.contiguous() for x in _as_list(getattr(self.inner, name)(*args, **kwargs))]
        call = OpaqueCall(
            transport_call.text(),
            transport_call,
            tuple(map(shape_of, results)),
            name,
            arguments.get("op", "sum" if "reduce" in name else ""),
            call_info.ranks,
            call_info.bytes,
            _own_part(self.rank, arguments) if name == "all_gather_into_tensor" else None,
            _gathered_parts(name, arguments),
        )
        self._on_message(call, tensors_in((args, kwargs)), results)
        result: Any = results if name in _METHODS_OF_LISTS else results[0]
        if out_buffers is None:
            return result
        return [buffer.copy_(x) for buffer, x in zip(out_buffers, result, strict=True)]

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
            return CompletedHandle(x)
        arguments = {"x": x, "ranks": ranks}
        sent_bytes = record_of(self.rank, arguments, "all_reduce_async").bytes
        self._start_count += 1  # part of the text, so a start and its wait share one call number
        text = f"all_reduce {ranks} {op} {self._start_count}"
        call = OpaqueCall(
            text, _AllReduceStart(ranks, op), (), "all_reduce", op, tuple(ranks), sent_bytes
        )
        with hidden_from_modes():
            handle = self.inner.all_reduce_async(x.detach(), ranks, op)
        self._on_reduce_start(call, x)
        return _RecordedHandle(call, x, handle, self._on_reduce_wait)

    def as_one(
        self, run: Callable[[list[Tensor]], list[Tensor]], xs: list[Tensor], ranks: Ranks
    ) -> list[Tensor]:
        with hidden_from_modes(), counting(self.inner) as sent_count:
            results = [x.contiguous() for x in run(xs)]
        outs = tuple(map(shape_of, results))
        call = OpaqueCall(repr(run), run, outs, "as_one", "", tuple(ranks), sent_count.bytes)
        self._on_message(call, xs, results)
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
        # A program exchanges errors too (agreeing.py): in this message, or, if
        # ``_let_sum_carry_errors`` is false, in the messages of each ``AgreedOp`` before it.
        if len(ranks) == 1 or not self._let_sum_carry_errors(told):
            return Transport.all_reduce_with_notes(self, x, ranks, told, op)
        with hidden_from_modes():
            notes, total = self.inner.all_reduce_with_notes(x, ranks, told, op)
        if total is not None:
            sent_bytes = record_of(self.rank, {"x": x, "ranks": ranks}, "all_reduce").bytes
            self._on_message(SumWithErrors(ranks, told, op).call(total, sent_bytes), [x], [total])
        return notes, total

    # Reads of other ranks' memory are recorded as messages, which the base class sends.
    peers = Transport.peers
    addends = Transport.addends


_METHODS_OF_LISTS = (
    "all_gather",
    "all_to_all",
    "exchange",
    "all_gather_several",
    "reduce_scatter_several",
)
_SENDING_METHODS = (
    *_METHODS_OF_LISTS, "all_reduce", "all_gather_into_tensor", "reduce_scatter",
    "all_to_all_single", "broadcast",
)  # fmt: skip


def _gathered_parts(name: str, arguments: dict[str, Any]) -> tuple[tuple, ...]:
    if name == "all_gather_into_tensor":
        dims, sizes = [arguments["dim"] % arguments["x"].dim()], [arguments["sizes"]]
    elif name == "all_gather_several":
        dims, sizes = arguments["dims"], arguments["sizes"]
    else:
        return ()
    ranks = tuple(arguments["ranks"])
    return tuple((dim, tuple(size), ranks) for dim, size in zip(dims, sizes, strict=True))


def _own_part(rank: int, arguments: dict[str, Any]) -> tuple[int, int, int]:
    sizes, index = arguments["sizes"], arguments["ranks"].index(rank)
    dim = arguments["dim"] % arguments["x"].dim()
    return dim, sum(sizes[:index]), sizes[index]


class _TransportCall:
    """Recorded call of a transport method, which a program repeats with other tensors.

    Args:
        name: the method, such as "all_gather".
        args, kwargs: its arguments, which are stored with placeholders instead of the tensors.
    """

    def __init__(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        self.name = name
        self._stored_arguments = map_tensors((args, kwargs), lambda _: _TENSOR_PLACEHOLDER)

    def __call__(self, xs: list[Tensor]) -> list[Tensor]:
        remaining = iter(xs)
        args, kwargs = _fill_placeholders(self._stored_arguments, remaining)
        return [x.contiguous() for x in _as_list(getattr(current(), self.name)(*args, **kwargs))]

    @property
    def arguments(self) -> dict[str, Any]:
        """Arguments of the call by name, with placeholders for tensors."""
        return arguments_by_name(self.name, *self._stored_arguments)

    def text(self) -> str:
        """Return the call as text that identifies it, with placeholders for tensors."""
        return f"{self.name} {self._stored_arguments!r}"


class _AllReduceStart:
    """Callable that starts a recorded in-place all-reduce; a later op of the program waits for it.

    Called with a tensor, it starts the all-reduce of that tensor, and returns the work handle.
    """

    def __init__(self, ranks: Ranks, op: str) -> None:
        self._ranks, self._op = ranks, op

    def __call__(self, x: Tensor) -> Handle:
        return current().all_reduce_async(x.detach(), self._ranks, self._op)


class _RecordedHandle:
    """Handle that a step gets for an asynchronous all-reduce while it is recorded.

    Its ``wait()`` waits for the handle ``inner`` of the transport, and records the wait by
    ``on_wait``.
    """

    def __init__(self, call: OpaqueCall, x: Tensor, inner: Handle, on_wait: ReduceCallback) -> None:
        self._call, self._x, self._on_wait = call, x, on_wait
        self._inner: Handle | None = inner

    def wait(self) -> Tensor:
        if self._inner is not None:
            with hidden_from_modes():
                copy_unless_same_memory(self._inner.wait(), self._x)
            self._on_wait(self._call, self._x)
            self._inner = None
        return self._x


class _TensorPlaceholder:
    def __repr__(self) -> str:
        return "x"


_TENSOR_PLACEHOLDER = _TensorPlaceholder()


def _fill_placeholders(value: Any, tensors: Any) -> Any:
    if value is _TENSOR_PLACEHOLDER:
        return next(tensors)
    if isinstance(value, dict):
        return {key: _fill_placeholders(x, tensors) for key, x in value.items()}
    if isinstance(value, list | tuple) and not isinstance(value, torch.Size):
        return type(value)(_fill_placeholders(x, tensors) for x in value)
    return value


def _as_list(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]
