"""Captures on the CPU what a CUDA graph captures on a GPU: ops on fixed memory, without effect
until they are replayed, and a replay that runs them again into the same memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class _Ops(TorchDispatchMode):
    """Notes each op with its tensors, and what memory was before it was written."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.before: dict[int, tuple[Tensor, Tensor]] = {}
        self.given: set[int] = set()
        self.fresh: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "consistent" and func._opname in ("message", "drawn"):
            raise RuntimeError("Python runs in it")
        for x in tree_leaves((args, kwargs)):
            if isinstance(x, Tensor) and _at(x) not in self.fresh:
                self.given.add(_at(x))
                if func._schema.is_mutable:
                    whole = torch.empty(0, dtype=torch.uint8).set_(x.untyped_storage())
                    self.before.setdefault(_at(x), (whole, whole.clone()))
        made = func(*args, **kwargs)
        outs = [x for x in tree_leaves(made) if isinstance(x, Tensor)]
        self.fresh.update({_at(x): x for x in outs if _at(x) not in self.given})
        self.ops.append((func, args, kwargs, outs))
        return made


class RecordedGraphs:
    """Counts what it does in ``done``."""

    device = "cpu"
    done: list[str] = []
    fails: str = ""

    @staticmethod
    def why_not() -> str:
        return ""

    def warm_up(self, run: Callable[[], Sequence[Tensor]]) -> Sequence[Tensor]:
        self.done.append("warm up")
        return run()

    def capture(self, run: Callable[[], Sequence[Tensor]]) -> tuple[Callable[[], None], list]:
        if self.fails:
            raise RuntimeError(self.fails)
        self.done.append("capture")
        with _Ops() as noted:
            made = list(run())
        for whole, before in noted.before.values():
            whole.copy_(before)
        for x in noted.fresh.values():  # nothing has been computed yet
            if x.is_floating_point():
                x.fill_(torch.nan)

        def replay() -> None:
            self.done.append("replay")
            for func, args, kwargs, outs in noted.ops:
                again = [x for x in tree_leaves(func(*args, **kwargs)) if isinstance(x, Tensor)]
                for place, x in zip(outs, again, strict=True):
                    if place.data_ptr() != x.data_ptr():
                        place.copy_(x)

        return replay, made


def _at(x: Tensor) -> int:
    return x.untyped_storage().data_ptr()
