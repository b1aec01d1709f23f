"""Lists of callbacks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def set_aside(callbacks: list) -> Iterator[None]:
    """Inside, the list is empty: a callback that passes a call on must not be called again."""
    kept, callbacks[:] = callbacks[:], []
    try:
        yield
    finally:
        callbacks[:] = kept
