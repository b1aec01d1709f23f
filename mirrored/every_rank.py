"""Ranks tell each other how a step went: if it failed on one, it fails on all with one message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from .readable import readable
from .transports.default import current

T = TypeVar("T")

_PLAIN = (FileNotFoundError, ValueError, TypeError)


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
        what: what ranks do, the begin of the message.
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
    transport = current()
    answers = transport.gather_objects(told, tuple(range(transport.size)))
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
