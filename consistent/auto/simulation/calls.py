"""Calls of modules in the log of a simulation, with arguments from which a call can be made again.

```
y = block(x, mask, scale=2)    --->    ModuleEntered("block", ((Blank(8x64), mask), {"scale": 2}))
                                       Op ... Op ...
                                       ModuleLeft("block", [Blank(8x64)])
```
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ...graph.module_calls import module_calls
from ...spec.nested import map_tensors, tensors_in
from .log import Log, ModuleEntered, ModuleLeft
from .memory import Memory

_MAKE = "what stands for blanks"


def fill_blanks(arguments: Any, make: Callable[[Blank], Any]) -> Any:
    """Return a deep copy of ``arguments`` in which ``make(blank)`` replaces each ``Blank``.

    With it, a logged call can be made again with new tensors. Blanks are found at any depth.
    """
    memo: dict[Any, Any] = {_MAKE: make}
    return copy.deepcopy(arguments, memo)


@dataclass(frozen=True)
class Blank:
    """Description of an imagined tensor (without values), which replaces it in logged arguments.

    ``tracked`` tells whether the tensor required grad.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    tracked: bool

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def __deepcopy__(self, memo: dict[Any, Any]) -> Any:
        """Return the blank itself, or its replacement inside ``fill_blanks``."""
        make = memo.get(_MAKE)
        return self if make is None else make(self)


def log_calls(
    log: Log, memory: Memory, modules: Iterable[tuple[str, nn.Module]]
) -> AbstractContextManager[None]:
    """Log each call of the named ``modules`` that is made inside the ``with`` block.

    Args:
        log: gets a ``ModuleEntered`` and a ``ModuleLeft`` event for each call.
        memory: knows which tensors are imagined (without values); in the log, a ``Blank`` replaces
            each of them.
        modules: (name, module) pairs.
    """

    def blank(x: Tensor) -> Any:
        if memory.number(x) is None:
            return x.detach()  # a small tensor with real values
        return Blank(tuple(x.shape), x.dtype, x.requires_grad)

    def enter(name: str, *arguments: Any) -> None:
        log.events.append(ModuleEntered(name, _copy_arguments(arguments, blank)))

    def leave(name: str, out: Any) -> None:
        outs = [x for x in map(blank, tensors_in(out)) if isinstance(x, Blank)]
        log.events.append(ModuleLeft(name, outs))

    return module_calls(modules, enter, leave)


def _copy_arguments(arguments: Any, blank: Callable[[Tensor], Any]) -> Any:
    """Return a copy of a call's arguments, with ``blank(x)`` in place of each tensor x.

    They are copied before the module runs, because later modules may modify them in place, such as
    a key-value cache.
    """
    with _CopyingTensors(blank):
        try:
            return copy.deepcopy(arguments)
        except (TypeError, RuntimeError):  # something inside cannot be copied
            return map_tensors(arguments, blank)


class _CopyingTensors(TorchFunctionMode):
    """Torch function mode under which ``copy.deepcopy`` replaces a tensor x by ``change(x)``."""

    def __init__(self, change: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self._change = change

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__deepcopy__:
            return self._change(args[0])
        return func(*args, **(kwargs or {}))
