"""What one rank's shard makes an op raise, every rank of the placement raises, at the same call.

```
rank 0   op on its shard: fine          | tell | raises LinAlgError: ... on rank 1
rank 1   op on its shard: LinAlgError   | tell | raises LinAlgError: ... on rank 1
```

So a program that catches the error goes on in step. The ranks tell each other after each op of
``rules/raising.py`` whose deciding operands are not the same on all of them: a meeting where they
share memory, a short message to each other rank elsewhere. Nothing is sent by others.

A form sends by itself, and ranks must not wait in that for a rank that has raised. So they also
tell each other before its first exchange; and only then, if the form looks at all values before it
sends, as losses do before they count labels. The count travels in the message that tells.
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

_ASKS_NOBODY = frozenset("shares link hosts_of bytes_by_messages abandon gather_notes".split())
_ON_AGREEMENT = callbacks("on_agreement")


def on_all(
    ranks: Ranks, compute: Callable[[], T], is_told: Callable[[], bool] = lambda: False
) -> T:
    """``compute()``, which sends nothing. ``is_told``: whether it has told already how it went.

    Raises:
        Exception: that of the first one of ``ranks`` on which it raised, on all of them.
    """
    error, out = None, None
    begin(ranks)
    try:
        out = compute()
    except Exception as raised:
        error = raised
    finally:
        if not is_told():
            end(ranks)
    try:
        if error is not None or not is_told():
            tell(error, ranks)
    finally:
        error = None  # its stack holds this frame
    return out  # type: ignore[return-value]


def on_all_by_form(ranks: Ranks, compute: Callable[[], T], raises_first: bool) -> T:
    """``on_all`` for what may send; if it ``raises_first``, it raises no more once it sends."""
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
    """The ranks of a placement, in its order."""
    return tuple(placement.ranks.ravel().tolist())


def all_ranks() -> Ranks:
    """The ranks of the world."""
    return tuple(range(current().size))


def tell(error: Exception | None, ranks: Ranks) -> None:
    """Raise on all ``ranks`` what one of them gives; a collective.

    Raises:
        Exception: the first error in the order of ``ranks``.
    """
    notes = current().gather_notes(b"" if error is None else note_of(error), ranks)
    heed(notes, ranks, error)


def heed(notes: list[bytes], ranks: Ranks, error: Exception | None = None) -> None:
    """Raise the first error that ``notes`` tell of."""
    for rank, note in zip(ranks, notes, strict=True):
        if note:
            told = error_of(note, told_by(rank))
            raised_together(str(told))
            raise told from error


def told_by(rank: int) -> str:
    """What is added to the text of an error that all ranks raise."""
    return f"\n  Rank {rank} met this in its part of the values{_EVERY_RANK}"


def note_of(error: Exception) -> bytes:
    """The class and the text of an error, to be sent."""
    kind, text = type(error), str(error)
    try:
        return pickle.dumps((kind, text))
    except (pickle.PicklingError, AttributeError, TypeError):  # a class inside a function
        return pickle.dumps((RuntimeError, f"{kind.__name__}: {text}"))


def error_of(note: bytes, more: str = "") -> Exception:
    """The error that ``note_of`` was given on another rank, with ``more`` after its text."""
    kind, text = pickle.loads(note)
    text += "" if text.endswith(_EVERY_RANK) else more
    try:
        return kind(text)
    except Exception:  # it takes other arguments
        return RuntimeError(f"{kind.__name__}: {text}")


def begin(ranks: Ranks) -> None:
    """Notify tracers that ``ranks`` will tell each other how what runs now went."""
    for notify in _ON_AGREEMENT:
        notify(ranks, True)


def end(ranks: Ranks) -> None:
    """Notify tracers that it has run, or that the ranks have told each other already."""
    for notify in _ON_AGREEMENT:
        notify(ranks, False)


class _Told(BaseException):
    """An error that all ranks raise already; no ``Exception``, so that it is not told again."""

    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error


class _Guard(Wrapper):
    """Before its first call, ranks tell each other that they have come here: in the message of that
    call, if it is a sum of a few numbers. If that ``is_last``, nothing raises after it."""

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
