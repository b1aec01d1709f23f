"""Calls that a program holds as they are: messages between ranks, and random numbers.

To a compiler each is one op on tensors; what it does is found by a number, which is a hash of what
it is, so that programs that differ in it are not taken for one another when they are found in a
cache on disk.

```
consistent::message(Tensor[] xs, int number) -> Tensor[]     kept in order, as all ranks send alike
consistent::reduce_(Tensor(a!) x, int number) -> ()           the same; sums into x
consistent::drawn(Tensor[] xs, Tensor key, int number) -> Tensor[]     key: seed, and draws so far
```
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

Shape = tuple[tuple[int, ...], torch.dtype, torch.device]


@dataclass(frozen=True)
class Call:
    """What a number stands for.

    Args:
        text: says all that ``run`` depends on beside the tensors.
        run: the tensors -> its results; of ``drawn`` with (seed, counter) before them.
        outs: shape, dtype and device of each result.
        kind, op: of a message, the method of the transport, and how it reduces.
        ranks: that take part in it.
        bytes: that this rank sends in it.
        own: of a tensor that is joined, (dim, start, size) of this rank's part.
        gathered: of each tensor of a gather, what its result depends on beside it.
    """

    text: str
    run: Callable[..., Any]
    outs: tuple[Shape, ...]
    kind: str = ""
    op: str = ""
    ranks: tuple[int, ...] = ()
    bytes: int = 0
    own: tuple[int, int, int] | None = None
    gathered: tuple[tuple, ...] = ()

    @property
    def number(self) -> int:
        """The same for the same call, in every process."""
        digest = hashlib.sha256(f"{self.text} -> {self.outs}".encode()).digest()
        return int.from_bytes(digest[:7], "big")


class _Thread(threading.local):
    calls: dict[int, Call] | None = None


_thread = _Thread()


@contextmanager
def known(calls: dict[int, Call]) -> Iterator[None]:
    """Inside, numbers stand for these calls."""
    before, _thread.calls = _thread.calls, calls
    try:
        yield
    finally:
        _thread.calls = before


def _call(number: int) -> Call:
    assert _thread.calls is not None, "a recorded program runs outside its runner"
    return _thread.calls[number]


def _made(call: Call) -> list[Tensor]:
    return [torch.empty(shape, dtype=dtype, device=device) for shape, dtype, device in call.outs]


@torch.library.custom_op("consistent::message", mutates_args=())
def message(xs: Sequence[Tensor], number: int) -> list[Tensor]:
    """Send and receive; see ``mirrored.comm.Transport``."""
    return list(_call(number).run(list(xs)))


@message.register_fake
def _(xs: Sequence[Tensor], number: int) -> list[Tensor]:
    return _made(_call(number))


@torch.library.custom_op("consistent::reduce_", mutates_args=("x",))
def reduce_(x: Tensor, number: int) -> None:
    """Reduce ``x`` over ranks, in place."""
    _call(number).run(x)


@reduce_.register_fake
def _(x: Tensor, number: int) -> None:
    return None


@torch.library.custom_op("consistent::drawn", mutates_args=())
def drawn(xs: Sequence[Tensor], key: Tensor, number: int) -> list[Tensor]:
    """Draw random numbers as a step does that is ``key[1]`` draws after the seed ``key[0]``."""
    seed, counter = key.tolist()
    return list(_call(number).run(seed, counter, list(xs)))


@drawn.register_fake
def _(xs: Sequence[Tensor], key: Tensor, number: int) -> list[Tensor]:
    return _made(_call(number))


MESSAGE = torch.ops.consistent.message.default
REDUCE = torch.ops.consistent.reduce_.default
DRAWN = torch.ops.consistent.drawn.default
SENDING = (MESSAGE, REDUCE)


def _keep_in_order() -> None:
    """Tell compilers that messages are not moved past each other: every rank sends them alike."""
    from torch._higher_order_ops.effects import _register_effectful_op
    from torch._library.effects import EffectType

    for op in SENDING:
        _register_effectful_op(op, EffectType.ORDERED)


_keep_in_order()


def shape_of(x: Any) -> Shape:
    """That of one result."""
    with torch._C.DisableTorchFunction():
        return tuple(torch.Tensor.size(x)), x.dtype, torch.Tensor.device.__get__(x)  # type: ignore
