"""Custom ops by which a recorded graph contains calls that a compiler must not look into: messages
between ranks, and random ops ("draws").

To a compiler, each is one op on tensors. Which call it makes is given by a number, which is a hash
of what the call does, so that programs whose calls differ are not mistaken for each other in a
compiler's cache on disk.

```
consistent::message(Tensor[] xs, int number) -> Tensor[]     kept in the same order on all ranks
consistent::start_message(Tensor[] xs, int number, int ticket) -> ()     the same in a thread;
consistent::wait_message(Tensor[] xs, int number, int ticket) -> Tensor[]     its results
consistent::start_reduce_(Tensor(a!) x, int number) -> ()     starts to reduce x in place;
consistent::wait_reduce_(Tensor(a!) x, int number) -> ()      x is reduced; ops run in between
consistent::drawn(Tensor[] xs, Tensor key, int number) -> Tensor[]     key: seed, and draws so far
```

Code that serves several sizes gets its numbers at run time, and is compiled before they are known.
Ops that return tensors therefore take two more arguments that describe the results: their sizes in
one list, which may be symbols, and their kinds, such as ``float32 2 cpu; int64 1 cpu`` (dtype,
number of dims, device).
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor

from mirrored.comm import Handle
from mirrored.transports.default import current, wrap_current
from mirrored.transports.ordered import Ordered
from mirrored.transports.side_stream import SideStreamMessage

Shape = tuple[tuple[int, ...], torch.dtype, torch.device]


class MessageObserver(Protocol):
    """Protocol of an observer that is notified of the messages of a running program.

    ``watching.EventReporter`` is one; it reports them to tracers.
    """

    def observe_call(self, number: int) -> AbstractContextManager[None]:
        """Return a context manager for call ``number``.

        It is entered around each call that sends, or that waits for a started message.
        """
        ...


@dataclass(frozen=True)
class OpaqueCall:
    """A recorded message or random op, which its number represents in a graph.

    Args:
        text: description of everything that ``run`` depends on, except the tensors; calls of equal
            text are equal.
        run: function that returns the results for a list of tensors. That of a random op takes
            (seed, counter) before the list; that of an in-place all-reduce takes the tensor, and
            returns a handle.
        outs: shape, dtype and device of each result.
        kind, op: for a message, the method of the transport, such as "all_reduce", and the
            reduction, such as "sum".
        ranks: the ranks that take part in it.
        bytes: bytes that this rank sends in it.
        own_part: for a join (all-gather into one tensor), (dim, start, size) of this rank's part
            of the result.
        gathered: for a gather, what the result of each tensor depends on besides the tensor: (dim,
            sizes, ranks).
        where: the lines of the step that send it, at most three.
        computes: whether the message also computes, such as a matmul whose result is sent in
            chunks.
    """

    text: str
    run: Callable[..., Any]
    outs: tuple[Shape, ...]
    kind: str = ""
    op: str = ""
    ranks: tuple[int, ...] = ()
    bytes: int = 0
    own_part: tuple[int, int, int] | None = None
    gathered: tuple[tuple, ...] = ()
    where: str = ""
    computes: bool = False

    @property
    def is_sum(self) -> bool:
        """Return whether the call is the sum of one tensor over ranks, and nothing else."""
        sums = self.kind in ("all_reduce", "reduce_scatter") and self.op == "sum"
        return sums and len(self.outs) == 1

    @cached_property
    def number(self) -> int:
        """A number that identifies the call in every process: a hash of ``text`` and ``outs``."""
        digest = hashlib.sha256(f"{self.text} -> {self.outs}".encode()).digest()
        # 7 bytes fit the signed 64-bit int of an op's schema.
        return int.from_bytes(digest[:7], "big")


class _ThreadState(threading.local):
    def __init__(self) -> None:
        self.calls: dict[int, OpaqueCall] | None = None
        self.observer: MessageObserver | None = None
        self.pending_reduces: dict[int, deque[Handle]] = {}
        self.started_messages: dict[int, tuple[Future[list[Tensor]], SideStreamMessage | None]] = {}


_thread = _ThreadState()


@contextmanager
def use_calls(
    calls: dict[int, OpaqueCall], observer: MessageObserver | None = None
) -> Iterator[None]:
    """Make the custom ops of this file find their calls in ``calls``, by number, inside the block.

    A program runs inside it. ``observer``, if given, is notified of each call that sends or waits.
    """
    previous = _thread.calls, _thread.observer, _thread.pending_reduces, _thread.started_messages
    _thread.calls, _thread.observer, _thread.pending_reduces, _thread.started_messages = (
        calls, observer, {}, {},
    )  # fmt: skip
    try:
        yield
    finally:
        for future, _ in _thread.started_messages.values():  # left over only if the step has failed
            # exception() waits, so that no message of this step is under way in the next one.
            future.exception()
        _thread.calls, _thread.observer, _thread.pending_reduces, _thread.started_messages = (
            previous
        )


def _observed_call(number: int) -> AbstractContextManager[None]:
    return nullcontext() if _thread.observer is None else _thread.observer.observe_call(number)


def _call_by_number(number: int) -> OpaqueCall:
    assert _thread.calls is not None, "a recorded program runs outside its runner"
    return _thread.calls[number]


def result_sizes(number: int) -> tuple[list[int], str]:
    """Return the results of call ``number`` as (all sizes in one list, kinds as text).

    Example: one float32 result of shape [8, 4] on the CPU gives ``([8, 4], "float32 2 cpu")``. Code
    that serves several sizes passes the two as the arguments ``sizes`` and ``kinds`` of the ops.
    """
    outs = _call_by_number(number).outs
    kinds = [f"{str(dtype)[6:]} {len(shape)} {device}" for shape, dtype, device in outs]
    return [size for shape, _, _ in outs for size in shape], "; ".join(kinds)


@functools.lru_cache(maxsize=256)
def _parse_kinds(kinds: str) -> list[tuple[torch.dtype, int, str]]:
    parts = [kind.split(" ") for kind in kinds.split("; ") if kind]
    return [(getattr(torch, dtype), int(dims), device) for dtype, dims, device in parts]


def _empty_results(number: int, sizes: Sequence[int] | None, kinds: str) -> list[Tensor]:
    if sizes is None:
        outs = _call_by_number(number).outs
        return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in outs]
    remaining_sizes = iter(sizes)
    return [
        torch.empty([next(remaining_sizes) for _ in range(dims)], dtype=dtype, device=device)
        for dtype, dims, device in _parse_kinds(kinds)
    ]


def _with_own_storage(results: Sequence[Tensor]) -> list[Tensor]:
    """Return ``results`` such that each has a storage of its own, as torch requires of a custom op.

    A transport may return parts of one buffer; those are copied.
    """
    unaliased, memories = [], set()
    for x in results:
        memory = x.untyped_storage()._cdata
        unaliased.append(x.clone() if memory in memories else x)
        memories.add(memory)
    return unaliased


def _join_started_messages() -> None:
    """Make the CUDA stream of the program wait for all messages that were started on a side stream.

    Called before a further message. Ranks that read each other's GPU memory wait for each other in
    each message, so all must run their messages in the order in which they were sent.
    """
    for future, side_stream in _thread.started_messages.values():
        if side_stream is not None:
            future.exception()
            side_stream.join()


@torch.library.custom_op("consistent::message", mutates_args=())
def message(
    xs: Sequence[Tensor],
    number: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    """Run call ``number`` on ``xs``: send them, and return the received tensors.

    The calls are methods of ``mirrored.comm.Transport``. ``sizes`` and ``kinds`` describe the
    results to a compiler (``result_sizes``); a run ignores them.
    """
    call = _call_by_number(number)
    recorded_at = call.where  # noqa: F841 - read from this frame to report where a rank waits
    with _observed_call(number):
        _join_started_messages()
        return _with_own_storage(call.run(list(xs)))


@message.register_fake
def _(
    xs: Sequence[Tensor],
    number: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    return _empty_results(number, sizes, kinds)


@torch.library.custom_op("consistent::start_message", mutates_args=())
def start_message(xs: Sequence[Tensor], number: int, ticket: int) -> None:
    """Start the call ``number`` in a thread, after all messages that were started before.

    ``ticket`` is the number by which ``wait_message`` finds the message.
    """
    transport = current()
    if not isinstance(transport, Ordered):
        # ``Ordered`` runs the messages of the program and of the thread in the order of their
        # calls.
        transport = wrap_current(Ordered)
    assert isinstance(transport, Ordered)
    send, side_stream = _call_by_number(number).run, SideStreamMessage.for_tensors(xs)
    with _observed_call(number):
        run = send if side_stream is None else functools.partial(side_stream.run, send)
        _thread.started_messages[ticket] = transport.submit(run, list(xs)), side_stream


@start_message.register_fake
def _(xs: Sequence[Tensor], number: int, ticket: int) -> None:
    return None


@torch.library.custom_op("consistent::wait_message", mutates_args=())
def wait_message(
    xs: Sequence[Tensor],
    number: int,
    ticket: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    """Wait for the message that ``start_message`` started with ``ticket``, and return its results.

    ``xs`` are the tensors that it sends; as arguments, they stay alive until then. ``sizes`` and
    ``kinds`` are those of ``message``.
    """
    recorded_at = _call_by_number(number).where  # noqa: F841 - as above
    with _observed_call(number):
        future, side_stream = _thread.started_messages.pop(ticket)
        results = future.result()
        if side_stream is not None:
            # Must precede _with_own_storage, which copies results that share a buffer.
            side_stream.join(results)
        return _with_own_storage(results)


@wait_message.register_fake
def _(
    xs: Sequence[Tensor],
    number: int,
    ticket: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    return _empty_results(number, sizes, kinds)


@torch.library.custom_op("consistent::start_reduce_", mutates_args=("x",))
def start_reduce_(x: Tensor, number: int) -> None:
    """Start the all-reduce of ``x`` that is call ``number``; ``wait_reduce_`` waits for it."""
    call = _call_by_number(number)
    recorded_at = call.where  # noqa: F841 - as above
    with _observed_call(number):
        _join_started_messages()
        _thread.pending_reduces.setdefault(number, deque()).append(call.run(x))


@start_reduce_.register_fake
def _(x: Tensor, number: int) -> None:
    return None


@torch.library.custom_op("consistent::wait_reduce_", mutates_args=("x",))
def wait_reduce_(x: Tensor, number: int) -> None:
    """Wait for the oldest all-reduce of call ``number``, and write its result into ``x``.

    Several may be under way, since equal calls have the same number.
    """
    recorded_at = _call_by_number(number).where  # noqa: F841 - as above
    with _observed_call(number):
        copy_unless_same_memory(_thread.pending_reduces[number].popleft().wait(), x)


@wait_reduce_.register_fake
def _(x: Tensor, number: int) -> None:
    return None


def copy_unless_same_memory(result: Tensor, x: Tensor) -> None:
    """Copy ``result``, the result of an in-place reduction of ``x``, into ``x``.

    Nothing is done if the transport has reduced in the memory of ``x`` itself.
    """
    if result.data_ptr() != x.data_ptr():
        x.copy_(result)


@torch.library.custom_op("consistent::drawn", mutates_args=())
def drawn(
    xs: Sequence[Tensor],
    key: Tensor,
    number: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    """Run the random op of call ``number``, and return its results.

    ``key`` contains two numbers: the seed, and how many draws were made before the present segment
    of the program. ``sizes`` and ``kinds`` are those of ``message``.
    """
    seed, counter = key.tolist()
    return list(_call_by_number(number).run(seed, counter, list(xs)))


@drawn.register_fake
def _(
    xs: Sequence[Tensor],
    key: Tensor,
    number: int,
    sizes: Sequence[int] | None = None,
    kinds: str = "",
) -> list[Tensor]:
    return _empty_results(number, sizes, kinds)


MESSAGE = torch.ops.consistent.message.default
START_MESSAGE = torch.ops.consistent.start_message.default
WAIT_MESSAGE = torch.ops.consistent.wait_message.default
START_REDUCE = torch.ops.consistent.start_reduce_.default
WAIT_REDUCE = torch.ops.consistent.wait_reduce_.default
DRAWN = torch.ops.consistent.drawn.default
SENDING_OPS = (MESSAGE, START_MESSAGE, START_REDUCE)
ORDERED_OPS = (*SENDING_OPS, WAIT_MESSAGE, WAIT_REDUCE)


def _register_ordered_effects() -> None:
    """Register the messages as ordered effects, so that compilers keep their order.

    Ranks deadlock unless every rank sends the same messages in the same order.
    """
    from torch._higher_order_ops.effects import _register_effectful_op
    from torch._library.effects import EffectType

    for op in ORDERED_OPS:
        _register_effectful_op(op, EffectType.ORDERED)


_register_ordered_effects()


def shape_of(x: Any) -> Shape:
    """Return shape, dtype and device of ``x``; for a global tensor, those of its local shard."""
    with torch._C.DisableTorchFunction():
        return tuple(torch.Tensor.size(x)), x.dtype, torch.Tensor.device.__get__(x)  # type: ignore
