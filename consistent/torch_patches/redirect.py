"""Redirection of torch's builtins, so that a call with a global tensor comes to this library."""

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
    """Make calls of ``builtin`` run ``handler(original, *args, **kwargs)``.

    ``builtin`` stays the same object, so names that were imported earlier are redirected, too.
    Calls of ``original`` are never redirected. Calls that the library itself makes on shards are
    redirected only with ``when="always"``.

    Args:
        builtin: a function or method of torch that is written in C.
        handler: what runs in its place.
        when: which calls are redirected. "always"; "global", if an argument is or contains a global
            tensor; "graph", also if the autograd graph of the first argument reaches one.
        after: for any other call whose result contains a global tensor, the result becomes
            ``after(result, *args)``.
    """
    original = _C.original(builtin)
    _C.redirect(builtin, functools.partial(handler, original), when, after)


def refuse(builtin: Any, name: str, instead: str, when: str = "global") -> None:
    """Make ``builtin`` raise a TypeError if it is called with a global tensor.

    ``name`` is its name in the message, ``instead`` what to call in its place, and ``when`` is as
    in ``redirect``.
    """

    def refused(_: Any, *args: Any, **kwargs: Any) -> Any:
        raise refusal(name, instead, args, kwargs)

    redirect(builtin, refused, when)


def refusal(name: str, instead: str, *arguments: Any) -> TypeError:
    """Return the error for a call of ``name`` that would see only the shard of a global tensor.

    ``instead`` says what to call in its place. ``arguments`` are the arguments of the call, from
    which the message describes the tensor.
    """
    tensors: list[Any] = []
    collect(arguments, tensors)
    spec = next((x._spec for x in tensors if is_global(x)), "one in a list")
    return TypeError(
        f"{name}: x is a global tensor, {spec}, and {name} would see this rank's shard only. "
        f"Use {instead}."
    )
