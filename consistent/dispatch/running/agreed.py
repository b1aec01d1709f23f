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
_WAITS_FOR_NONE = frozenset("shares link hosts_of bytes_by_messages abandon gather_notes".split())
_ON_AGREEMENT = callbacks("on_agreement")


def run_with_shared_errors(
    ranks: Ranks, compute: Callable[[], T], has_exchanged: Callable[[], bool] = lambda: False
) -> T:
    """Return ``compute()``, and raise the error on all ``ranks`` if it raises on one of them.

    Used for ops that refuse some values, such as a singular matrix that only one rank has in its
    shard.

    Args:
        ranks: ranks that all call this.
        compute: the function to run; it may not communicate.
        has_exchanged: returns whether the ranks have exchanged their errors already, so that
            nothing is left to send.

    Raises:
        Exception: on all ``ranks``, the error of the first one of them on which ``compute`` raised.
    """
    error, out = None, None
    begin_agreement(ranks)
    try:
        out = compute()
    except Exception as raised:
        error = raised
    finally:
        # Also for a BaseException, which is not sent to other ranks.
        if not has_exchanged():
            end_agreement(ranks)
    try:
        if error is not None or not has_exchanged():
            exchange_errors(error, ranks)
    finally:
        error = None  # breaks a reference cycle: the traceback of the error holds this frame
    return out  # type: ignore[return-value]


def run_form_with_shared_errors(ranks: Ranks, compute: Callable[[], T], raises_first: bool) -> T:
    """Do what ``run_with_shared_errors`` does for a ``compute`` that may communicate: a form.

    The ranks exchange errors before the first communication too, since no rank may wait in it for
    one that has raised. ``raises_first`` promises that ``compute`` raises nothing once it has begun
    to communicate; then they do not exchange errors again at the end.
    """
    guard = _Guard(current(), ranks, raises_first)

    def compute_guarded() -> T:
        with use(guard):
            return compute()

    try:
        return run_with_shared_errors(
            ranks, compute_guarded, lambda: guard.is_last and guard.has_exchanged
        )
    except _SharedError as shared:
        raise shared.error from shared.__cause__


@lru_cache(1 << 10)
def ranks_of(placement: Placement) -> Ranks:
    """Return the ranks of a placement in the order of its grid.

    ``[[0, 1], [2, 3]] -> (0, 1, 2, 3)``
    """
    return tuple(placement.ranks.ravel().tolist())


def all_ranks() -> Ranks:
    """Return the ranks of the world."""
    return tuple(range(current().size))


def exchange_errors(error: Exception | None, ranks: Ranks) -> None:
    """Exchange errors between ``ranks`` and raise the first one on all of them; a collective.

    ``error`` is this rank's error, or None if it has none.

    Raises:
        Exception: the first error in the order of ``ranks``.
    """
    notes = current().gather_notes(b"" if error is None else serialize_error(error), ranks)
    raise_first_error(notes, ranks, error)


def raise_first_error(notes: list[bytes], ranks: Ranks, error: Exception | None = None) -> None:
    """Raise the first error among ``notes``, messages received from ``ranks`` in their order.

    A note b"" means no error. ``error``, this rank's own error, becomes the cause of the raised
    one.
    """
    for rank, note in zip(ranks, notes, strict=True):
        if note:
            rank_error = deserialize_error(note, error_origin_text(rank))
            raised_together(str(rank_error))
            raise rank_error from error


def error_origin_text(rank: int) -> str:
    """Return the text that is added to the message of ``rank``'s error when all ranks raise it."""
    return f"\n  Rank {rank} met this in its part of the values{_EVERY_RANK}"


def serialize_error(error: Exception) -> bytes:
    """Serialize the class and the text of an error, to send it to other ranks."""
    kind, text = type(error), str(error)
    try:
        return pickle.dumps((kind, text))
    except (pickle.PicklingError, AttributeError, TypeError):  # e.g. a class local to a function
        return pickle.dumps((RuntimeError, f"{kind.__name__}: {text}"))


def deserialize_error(note: bytes, more: str = "") -> Exception:
    """Return the error that another rank serialized by ``serialize_error``.

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


def begin_agreement(ranks: Ranks) -> None:
    """Notify tracers that the code that follows ends with an exchange of errors between ``ranks``.

    A tracer that records a program also records this exchange.
    """
    for notify in _ON_AGREEMENT:
        notify(ranks, True)


def end_agreement(ranks: Ranks) -> None:
    """Notify tracers that the code since ``begin_agreement`` has run.

    Also called as soon as errors have been exchanged, if nothing after that can raise.
    """
    for notify in _ON_AGREEMENT:
        notify(ranks, False)


class _SharedError(BaseException):
    """Carries an error that was sent to all ranks out of ``compute``, so it is not sent again.

    As it is no ``Exception``, ``run_with_shared_errors`` does not catch it;
    ``run_form_with_shared_errors`` unwraps it.
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
        self.ranks, self.is_last, self.has_exchanged = ranks, is_last, False

    def all_reduce(self, x: Tensor, ranks: Ranks, op: str = "sum") -> Tensor:
        if self.has_exchanged:
            return self.inner.all_reduce(x, ranks, op)
        self.has_exchanged = True
        notes, total = self.inner.all_reduce_with_notes(x, ranks, self.ranks, op)
        self._raise_first_error(notes)
        assert total is not None
        return total

    def pass_on(self, name: str, *args: Any, **kwargs: Any) -> Any:
        if name not in _WAITS_FOR_NONE:
            self._exchange_errors()
        return super().pass_on(name, *args, **kwargs)

    def as_one(self, run: Any, xs: Any, ranks: Ranks) -> Any:
        self._exchange_errors()
        return self.inner.as_one(run, xs, ranks)

    def _exchange_errors(self) -> None:
        if self.has_exchanged:
            return
        self.has_exchanged = True
        self._raise_first_error(self.inner.gather_notes(b"", self.ranks))

    def _raise_first_error(self, notes: list[bytes]) -> None:
        if self.is_last:
            end_agreement(self.ranks)
        try:
            raise_first_error(notes, self.ranks)
        except Exception as error:
            raise _SharedError(error) from error.__cause__
