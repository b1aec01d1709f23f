"""Redirecting calls of torch's builtins to this library where a global tensor is given."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from ..dispatch import _C
from ..dispatch.plans.arguments import collect
from ..dispatch.plans.shards import is_global


def redirect(
    builtin: Any,
    handler: Callable[..., Any],
    when: str = "global",
    after: Callable[..., Any] | None = None,
) -> None:
    """Let ``handler(original, *args, **kwargs)`` answer calls of ``builtin``.

    ``when``: "always"; "global", where an argument is or holds a global tensor; "graph", also where
    the graph of the first argument reaches one. Inside the library, on shards, ``builtin`` does
    what it did before, and ``original`` does so everywhere. Where torch's own answer to any other
    call holds a global tensor, ``after(answer, *args)`` is the answer.
    """
    original = _C.original(builtin)
    _C.redirect(builtin, functools.partial(handler, original), when, after)


def refuse(builtin: Any, name: str, instead: str, when: str = "global") -> None:
    """Let ``builtin``, known as ``name``, raise for global tensors and say what to call."""

    def refused(_: Any, *args: Any, **kwargs: Any) -> Any:
        raise refusal(name, instead, args, kwargs)

    redirect(builtin, refused, when)


def refusal(name: str, instead: str, *given: Any) -> TypeError:
    """The error of a function that would see one shard of the global tensors in ``given``."""
    found: list[Any] = []
    collect(given, found)
    spec = next((x._spec for x in found if is_global(x)), "one in a list")
    return TypeError(
        f"{name}: x is a global tensor, {spec}, and {name} would see this rank's shard only. "
        f"Use {instead}."
    )
