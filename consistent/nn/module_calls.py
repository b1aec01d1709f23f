"""What is under way in calls of modules, and is undone where one of them raises.

Torch runs no hook after a module that was stopped by Ctrl-C, or whose hooks raised. So the call
itself is watched: Python looks for ``_call_impl``, by which torch calls a module, in the module's
``__dict__`` first.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torch import nn


class _Thread(threading.local):
    def __init__(self) -> None:
        self.under_way: list[Any] = []


_thread = _Thread()


def under_way() -> list[Any]:
    """What this thread has begun and not ended, the innermost last; each has ``end()``."""
    return _thread.under_way


def undo_on_raise(module: nn.Module) -> None:
    """From now on, end what a call of ``module`` has begun if that call raises anything."""
    module.__dict__["_call_impl"] = _Watched(module)


def remove_hooks(module: nn.Module, is_ours: Callable[[Any], bool]) -> None:
    """Take the hooks of which ``is_ours`` says so off ``module`` and all modules inside it, and
    stop watching their calls. Others' hooks stay, in their order."""
    for each in module.modules():
        for name, flags in _FLAGS.items():
            table = each.__dict__[name]
            for key in [key for key, hook in table.items() if is_ours(hook)]:
                for table_name in (name, *flags):
                    each.__dict__[table_name].pop(key, None)
        if isinstance(each.__dict__.get("_call_impl"), _Watched):
            del each.__dict__["_call_impl"]


_FLAGS = {
    "_forward_pre_hooks": ("_forward_pre_hooks_with_kwargs",),
    "_forward_hooks": ("_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
}


class _Watched:
    """The call of a module. A class, so that a module that has it can be copied and pickled."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        found = _thread.under_way
        before = len(found)
        try:
            return type(self.module)._call_impl(self.module, *args, **kwargs)
        except BaseException:
            while len(found) > before:
                found.pop().end()
            raise
