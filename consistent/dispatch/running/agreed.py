"""Agreement on errors: if an op raises on one rank, all ranks of the placement raise at that call.

```
rank 0   op on its shard: fine          | exchange errors | raises LinAlgError: ... on rank 1
rank 1   op on its shard: LinAlgError   | exchange errors | raises LinAlgError: ... on rank 1
```

So a program that catches the error stays in step on all ranks. The ranks exchange their errors
after each op of ``rules/raising.py`` if the operands that decide whether it raises are not the same
on all ranks. Ranks that share memory exchange them there; others send a short message to each other
rank. All other ops send nothing.

A form (this library's own implementation of an op) communicates, and no rank may wait in that for a
rank that has raised. So its ranks exchange errors before the first communication, too. A form that
checks all values before it communicates needs only this exchange. Losses do: they check the labels,
then all-reduce the number of labels, and the errors travel in the same message.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

from torch import Tensor

from mirrored.comm import Ranks, Transport
from mirrored.transports.base.wrapper import Wrapper
from mirrored.transports.default import current, use
from mirrored.transports.failures import raised_together

from ...spec import Placement
from ...spec.tracer import callbacks

T = TypeVar("T")

_EVERY_RANK = ", and every rank raises it."

# Methods of a transport before which ranks need not exchange errors: they wait for no other rank,
# or (gather_notes) are the exchange itself.
_ASKS_NOBODY = frozenset("shares link hosts_of bytes_by_messages abandon gather_notes".split())
_ON_AGREEMENT = callbacks("on_agreement")


def on_all(
    ranks: Ranks, compute: Callable[[], T], is_told: Callable[[], bool] = lambda: False
) -> T:
    """Return ``compute()``, and raise the error on all ``ranks`` if it raises on one of them.

    Used for ops that refuse some values, such as a singular matrix that only one rank has in its
    shard.

    Args:
        ranks: ranks that all call this.
        compute: the function to run; it may not communicate.
        is_told: returns whether the ranks have exchanged their errors already, so that nothing is
            left to send.

    Raises:
        Exception: on all ``ranks``, the error of the first one of them on which ``compute`` raised.
    """
    error, out = None, None
    begin(ranks)
    try:
        out = compute()
    except Exception as raised:
        error = raised
    finally:
        # Also for a BaseException, which is not sent to other ranks.
        if not is_told():
            end(ranks)
    try:
        if error is not None or not is_told():
            tell(error, ranks)
    finally:
        error = None  # breaks a reference cycle: the traceback of the error holds this frame
    return out  # type: ignore[return-value]


def on_all_by_form(ranks: Ranks, compute: Callable[[], T], raises_first: bool) -> T:
    """Do what ``on_all`` does for a ``compute`` that may communicate: an op that runs by a form.

    The ranks exchange errors before the first communication too, since no rank may wait in it for
    one that has raised. ``raises_first`` promises that ``compute`` raises nothing once it has begun
    to communicate; then they do not exchange errors again at the end.
    """
    guard = _Guard(current(), ranks, raises_first)

    def guarded() -> T:
        with use(guard):
            return compute()

    try:
        return on_all(ranks, guarded, lambda: guard.is_last and guard.met)
    except _Told as told:
        raise told.error from told.__cause__


@lru_cache(1 << 10)
def ranks_of(placement: Placement) -> Ranks:
    """Return the ranks of a placement in the order of its grid.

    ``[[0, 1], [2, 3]] -> (0, 1, 2, 3)``
    """
    return tuple(placement.ranks.ravel().tolist())


def all_ranks() -> Ranks:
    """Return the ranks of the world."""
    return tuple(range(current().size))


def tell(error: Exception | None, ranks: Ranks) -> None:
    """Exchange errors between ``ranks`` and raise the first one on all of them; a collective.

    ``error`` is this rank's error, or None if it has none to tell.

    Raises:
        Exception: the first error in the order of ``ranks``.
    """
    notes = current().gather_notes(b"" if error is None else note_of(error), ranks)
    heed(notes, ranks, error)


def heed(notes: list[bytes], ranks: Ranks, error: Exception | None = None) -> None:
    """Raise the first error among ``notes``, messages received from ``ranks`` in their order.

    A note b"" means no error. ``error``, this rank's own error, becomes the cause of the raised
    one.
    """
    for rank, note in zip(ranks, notes, strict=True):
        if note:
            told = error_of(note, told_by(rank))
            raised_together(str(told))
            raise told from error


def told_by(rank: int) -> str:
    """Return the text that is added to the message of ``rank``'s error when all ranks raise it."""
    return f"\n  Rank {rank} met this in its part of the values{_EVERY_RANK}"


def note_of(error: Exception) -> bytes:
    """Serialize the class and the text of an error, to send it to other ranks."""
    kind, text = type(error), str(error)
    try:
        return pickle.dumps((kind, text))
    except (pickle.PicklingError, AttributeError, TypeError):  # e.g. a class local to a function
        return pickle.dumps((RuntimeError, f"{kind.__name__}: {text}"))


def error_of(note: bytes, more: str = "") -> Exception:
    """Return the error that another rank serialized by ``note_of``.

    ``more`` is appended to its text, unless the error was exchanged before. If its class cannot be
    created from a text, it is a ``RuntimeError`` with the name of the class.
    """
    kind, text = pickle.loads(note)
    # An error that was exchanged before, by an inner agreement, has such a text already.
    text += "" if text.endswith(_EVERY_RANK) else more
    try:
        return kind(text)
    except Exception:  # the class takes other arguments than one text
        return RuntimeError(f"{kind.__name__}: {text}")


def begin(ranks: Ranks) -> None:
    """Notify tracers that the code that follows ends with an exchange of errors between ``ranks``.

    A tracer that records a program also records this exchange.
    """
    for notify in _ON_AGREEMENT:
        notify(ranks, True)


def end(ranks: Ranks) -> None:
    """Notify tracers that the code since ``begin`` has run.

    Also called as soon as errors have been exchanged, if nothing after that can raise.
    """
    for notify in _ON_AGREEMENT:
        notify(ranks, False)


class _Told(BaseException):
    """Takes an error out of ``compute`` that has been sent to all ranks, so it is not sent again.

    The class is no ``Exception``, so ``on_all`` does not catch it; ``on_all_by_form`` unwraps it.
    """

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Guard(Wrapper):
    """Transport wrapper that makes ``ranks`` exchange errors before a form's first communication.

    If that communication is an all-reduce, the errors travel in its message. ``is_last`` promises
    that nothing raises after this exchange, so that no other one follows.
    """

    def __init__(self, inner: Transport, ranks: Ranks, is_last: bool) -> None:
        super().__init__(inner)
        self.ranks, self.is_last, self.met = ranks, is_last, False

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        if self.met:
            return self.inner.all_reduce(x, ranks, op)
        self.met = True
        notes, total = self.inner.all_reduce_with_notes(x, ranks, self.ranks, op)
        self._heed(notes)
        assert total is not None
        return total

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in _ASKS_NOBODY:
            self._meet()
        return super().pass_on(name, *args, **kwargs)

    def as_one(self, run: Any, xs: Any, ranks: Ranks) -> Any:
        self._meet()
        return self.inner.as_one(run, xs, ranks)

    def _meet(self) -> None:
        if self.met:
            return
        self.met = True
        self._heed(self.inner.gather_notes(b"", self.ranks))

    def _heed(self, notes: list[bytes]) -> None:
        if self.is_last:
            end(self.ranks)
        try:
            heed(notes, self.ranks)
        except Exception as error:
            raise _Told(error) from error.__cause__
