"""Callbacks around the calls of modules, by torch's module hooks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import nn


@contextmanager
def module_calls(
    modules: Iterable[tuple[str, nn.Module]],
    enter: Callable[[str, tuple, dict[str, Any]], None],
    leave: Callable[[str, Any], None],
) -> Iterator[None]:
    """Call ``enter`` and ``leave`` around each call of ``modules`` that is made inside the block.

    Args:
        modules: (name, module) of each module; hooks on it are removed at the end.
        enter: (name, args, kwargs), before a call.
        leave: (name, result), after a call.
    """
    with ExitStack() as stack:
        for name, module in modules:

            def before(_: Any, args: tuple, kwargs: dict[str, Any], name: str = name) -> None:
                enter(name, args, kwargs)

            def after(_: Any, args: tuple, result: Any, name: str = name) -> None:
                leave(name, result)

            hook = module.register_forward_pre_hook(before, with_kwargs=True)
            stack.callback(hook.remove)
            stack.callback(module.register_forward_hook(after).remove)
        yield
