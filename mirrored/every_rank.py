"""Ranks compare notes: what differs between them, or fails on one, raises on all with one message.

```
gathered        the note of each rank
agree           the same, if all notes fit together
on_every_rank   what a step gives on each rank, if it failed on none
from_first      what a step gives on rank 0
```
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from .comm import Ranks
from .readable import readable
from .transports.default import current

T = TypeVar("T")

_PLAIN = (FileNotFoundError, ValueError, TypeError)


def gathered(note: Any, ranks: Ranks | None = None) -> list[Any]:
    """The ``note`` of each of ``ranks``, of the world by default, in their order. A collective of
    them. Notes are pickled; a rank that is alone gets its own."""
    transport = current()
    ranks = tuple(range(transport.size)) if ranks is None else ranks
    return [note] if len(ranks) == 1 else transport.gather_objects(note, ranks)


def alike(notes: Sequence[object]) -> bool:
    """Whether all notes are equal."""
    return all(note == notes[0] for note in notes)


def agree(
    note: T,
    error: Callable[[list[T]], Exception],
    *,
    ranks: Ranks | None = None,
    fits: Callable[[list[T]], bool] = alike,
) -> list[T]:
    """``gathered`` notes, if they fit together. A collective of ``ranks``.

    Args:
        note: what this rank says.
        error: what is raised on every rank where notes do not fit, made of all of them.
        ranks: who takes part; the world by default.
        fits: whether notes fit together, the same on all ranks; by default, whether they are equal.

    Raises:
        Exception: what ``error`` makes.
    """
    notes = gathered(note, ranks)
    if not fits(notes):
        raise error(notes)
    return notes


def by_rank(texts: Iterable[str], ranks: Iterable[int] | None = None) -> str:
    """A line for each of ``ranks``, which are numbered from 0 by default."""
    pairs = enumerate(texts) if ranks is None else zip(ranks, texts, strict=True)
    return "\n".join(f"    rank {rank}: {text}" for rank, text in pairs)


class _Failed:
    """What a rank met in place of a result; it is pickled and sent."""

    def __init__(self, error: Exception, kind: type[Exception]) -> None:
        plain = type(error) in (kind, *_PLAIN)
        self.text = str(error) if plain else f"{type(error).__name__}: {error}"
        self.is_missing = isinstance(error, FileNotFoundError)


def on_every_rank(
    what: str, step: Callable[[], T], kind: type[Exception] = RuntimeError
) -> list[T]:
    """``step()`` of each rank of the world, in order of rank. A collective.

    Args:
        what: what ranks do, the beginning of the message.
        step: what one rank does; it communicates with no other. Its result can be pickled.
        kind: the error of all ranks.

    Raises:
        kind: it raised on some rank.
        FileNotFoundError: it raised this on every rank on which it failed.
    """
    told: Any
    try:
        told = step()
    except Exception as error:
        told, own = _Failed(error, kind), error
    else:
        own = None
    answers = gathered(told)
    failed = {r: a for r, a in enumerate(answers) if isinstance(a, _Failed)}
    if failed:
        missing = all(a.is_missing for a in failed.values())
        text = readable(_joined(what, failed, len(answers)))
        raise (FileNotFoundError if missing else kind)(text) from own
    return answers


def _joined(what: str, failed: dict[int, _Failed], size: int) -> str:
    """One message of what the ranks met: each text once, with the ranks that met it."""
    by_text: dict[str, list[int]] = {}
    for rank, each in failed.items():
        by_text.setdefault(each.text, []).append(rank)
    if size == 1 or (len(by_text) == 1 and len(failed) == size):
        return f"{what}: {next(iter(by_text))}"
    lines = [f"  on rank {', '.join(map(str, ranks))}: {text}" for text, ranks in by_text.items()]
    return f"{what}: it failed, so every rank stops.\n" + "\n".join(lines)


def from_first(what: str, step: Callable[[], T], kind: type[Exception] = RuntimeError) -> T:
    """``step()`` of rank 0, on every rank; the other ranks wait for it. A collective.

    Raises:
        kind: it raised there.
    """
    return on_every_rank(what, lambda: step() if current().rank == 0 else None, kind)[0]  # type: ignore
