"""Undo the work that hooks have begun in a module call if that call raises.

Torch runs no hook after a module call that Ctrl-C stopped or whose hooks raised. The call itself is
therefore wrapped: torch calls a module through ``_call_impl``, which Python looks up in the
module's ``__dict__`` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


class _ThreadState(threading.local):
    def __init__(self) -> None:
        # A stack of work that hooks have begun in module calls, innermost last. Each entry has a
        # method ``end()`` that undoes the work, such as releasing gathered parameters.
        self.open_runs: list[Any] = []


this_thread = _ThreadState()


def undo_on_raise(module: nn.Module) -> None:
    """Wrap calls of ``module``, so that an error undoes what its hooks have begun.

    For example, it releases parameters that a pre-hook has gathered for the forward.
    """
    module.__dict__["_call_impl"] = _Watched(module)


def remove_hooks(module: nn.Module, should_remove: Callable[[Any], bool]) -> None:
    """Remove the hooks that ``should_remove`` selects from ``module`` and its submodules.

    ``undo_on_raise`` is undone, too. Other hooks stay, in their order.

    Args:
        module: the module.
        should_remove: (hook) -> whether to remove it.
    """
    for submodule in module.modules():
        for name, flags in _FLAG_TABLES.items():
            table = submodule.__dict__[name]
            for key in [key for key, hook in table.items() if should_remove(hook)]:
                for table_name in (name, *flags):
                    submodule.__dict__[table_name].pop(key, None)
        if isinstance(submodule.__dict__.get("_call_impl"), _Watched):
            del submodule.__dict__["_call_impl"]


# Tables of hooks -> further tables in which torch keeps flags of the same hooks.
_FLAG_TABLES = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


class _Watched:
    """Replacement of a module's ``_call_impl`` that undoes the work of hooks if the call raises.

    A class and not a closure, so that a module with it can be copied and pickled.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        stack = this_thread.open_runs
        depth = len(stack)
        try:
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        except BaseException:  # Ctrl-C, too
            while len(stack) > depth:
                stack.pop().end()
            raise
