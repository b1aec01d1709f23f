"""Collective helpers that exchange Python objects, so that all ranks raise the same errors.

A "note" is a small picklable object that a rank sends to the others.

```
gather_from_ranks returns the note of each rank
agree             also raises on all ranks if the notes do not fit together
on_every_rank     runs a step on each rank, and raises on all if it failed on any
from_rank_0       runs a step on rank 0, and returns its result on all
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .comm import Ranks
from .readable import escape_invisible
from .transports.default import current

T = TypeVar("T")

# Errors whose text is shown without the name of their type.
_UNPREFIXED_ERRORS = (FileNotFoundError, ValueError, TypeError)


def gather_from_ranks(note: Any, ranks: Ranks | None = None) -> list[Any]:
    """Return the ``note`` of each of ``ranks``, in their order. A collective over ``ranks``.

    ``ranks`` is the world by default. A note is any small picklable object. If there is only one
    rank, nothing is pickled, and the result contains ``note`` itself.
    """
    transport = current()
    ranks = tuple(range(transport.size)) if ranks is None else ranks
    return [note] if len(ranks) == 1 else transport.gather_objects(note, ranks)


def all_equal(notes: Sequence[object]) -> bool:
    """Return whether all notes are equal; the default condition of ``agree``."""
    return all(note == notes[0] for note in notes)


def agree(
    note: T,
    error: Callable[[list[T]], Exception],
    *,
    ranks: Ranks | None = None,
    fits: Callable[[list[T]], bool] = all_equal,
) -> list[T]:
    """Gather the notes of ``ranks`` and raise on all of them if they do not fit together.

    A collective over ``ranks``.

    Args:
        note: this rank's note.
        error: returns the error that every rank raises; called with all notes.
        ranks: the members; the world by default.
        fits: returns whether notes fit together, the same on all ranks; by default, whether all are
            equal.

    Returns:
        The note of each of ``ranks``.

    Raises:
        Exception: the result of ``error``, if the notes do not fit.
    """
    notes = gather_from_ranks(note, ranks)
    if not fits(notes):
        raise error(notes)
    return notes


def lines_by_rank(texts: Iterable[str], ranks: Iterable[int] | None = None) -> str:
    """Return lines such as ``rank 0: text``, one for each rank, for error messages.

    ``ranks`` are by default 0, 1 and so on.
    """
    pairs = enumerate(texts) if ranks is None else zip(ranks, texts, strict=True)
    return "\n".join(f"    rank {rank}: {text}" for rank, text in pairs)


class _ErrorRecord:
    """Record of an error that a rank sends in place of its result to ``on_every_rank``."""

    def __init__(self, error: Exception, kind: type[Exception]) -> None:
        plain = type(error) in (kind, *_UNPREFIXED_ERRORS)
        self.text = str(error) if plain else f"{type(error).__name__}: {error}"
        self.is_missing = isinstance(error, FileNotFoundError)


def on_every_rank(
    what: str, step: Callable[[], T], kind: type[Exception] = RuntimeError
) -> list[T]:
    """Run ``step()`` on each rank and return all results, in order of rank. A collective.

    Args:
        what: what ranks do; the error message begins with it.
        step: the work of one rank; it must not communicate. Its result can be pickled.
        kind: the type of the error that all ranks raise.

    Raises:
        kind: ``step`` raised on some rank.
        FileNotFoundError: ``step`` raised this on every rank on which it failed.
    """
    result: Any
    try:
        # An error is gathered like a result: a rank that raised here would leave the others
        # waiting.
        result = step()
    except Exception as error:
        result, own_error = _ErrorRecord(error, kind), error
    else:
        own_error = None
    results = gather_from_ranks(result)
    errors = {r: a for r, a in enumerate(results) if isinstance(a, _ErrorRecord)}
    if errors:
        missing = all(a.is_missing for a in errors.values())
        text = escape_invisible(_joint_message(what, errors, len(results)))
        raise (FileNotFoundError if missing else kind)(text) from own_error
    return results


def _joint_message(what: str, errors: dict[int, _ErrorRecord], size: int) -> str:
    """Return one error message from those of the ranks in ``errors``, of a world of ``size`` ranks.

    A text that several ranks have is given once, with its ranks: ``on rank 0, 2: no such file``.
    """
    by_text: dict[str, list[int]] = {}
    for rank, error in errors.items():
        by_text.setdefault(error.text, []).append(rank)
    if size == 1 or (len(by_text) == 1 and len(errors) == size):
        return f"{what}: {next(iter(by_text))}"
    lines = [f"  on rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    return f"{what}: it failed, so every rank stops.\n" + "\n".join(lines)


def from_rank_0(what: str, step: Callable[[], T], kind: type[Exception] = RuntimeError) -> T:
    """Run ``step()`` on rank 0 and return its result on every rank. A collective.

    The other ranks wait for rank 0.

    Args:
        what: what rank 0 does; the error message begins with it.
        step: the work; it must not communicate. Its result can be pickled.
        kind: the type of the error that all ranks raise.

    Raises:
        kind: ``step`` raised on rank 0.
        FileNotFoundError: ``step`` raised this on rank 0.
    """
    return on_every_rank(what, lambda: step() if current().rank == 0 else None, kind)[0]  # type: ignore
