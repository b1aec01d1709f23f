"""Modes that write down what they see."""

from __future__ import annotations

from typing import Any

from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode


class Ops(TorchDispatchMode):
    """Adds "op aten.mm.default" to ``seen`` for each op that runs below autograd."""

    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"op {func}")
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    """Adds "function matmul" to ``seen`` for each function of torch that is called."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(f"function {getattr(func, '__name__', func)}")
        return func(*args, **(kwargs or {}))
