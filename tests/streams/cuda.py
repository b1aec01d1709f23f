"""Streams, and the ops that run on them, for `stand_ins.py`: all that is asked for is noted."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import CustomOpDef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from consistent.compiled import opaque
from tests.streams.noted import Log


class Stream:
    """Notes what is asked of it."""

    def __init__(self, name: str, log: Log) -> None:
        self.name, self._log = name, log

    def record_event(self) -> int:
        event = self._log.count("event")
        self._log.note("record", self.name, event)
        return event

    def wait_event(self, event: int) -> None:
        self._log.note("wait", self.name, event)


class Cuda:
    """What the code uses of `torch.cuda`. A thread begins on the default stream."""

    def __init__(self, log: Log) -> None:
        self._log, self._thread = log, threading.local()
        self.default = Stream("default", log)

    def current_stream(self, device: Any = None) -> Stream:
        return getattr(self._thread, "stream", self.default)

    def Stream(self, device: Any, priority: int = 0) -> Stream:
        return Stream(f"side {self._log.count('side')}", self._log)

    def is_initialized(self) -> bool:
        return True

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        yield

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        """Ops of this thread inside are noted, on ``stream``."""
        before = self.current_stream()
        self._thread.stream = stream
        noted = getattr(self._thread, "noted", False)
        self._thread.noted = True
        try:
            with ExitStack() as stack:
                if not noted:
                    stack.enter_context(Ops(self._log, self))
                yield
        finally:
            self._thread.stream, self._thread.noted = before, noted


_MADE_OF_OPS = {
    getattr(torch.ops.consistent, op._qualname.partition("::")[2]).default: op._init_fn
    for op in vars(opaque).values()
    if isinstance(op, CustomOpDef)
}


class Ops(TorchDispatchMode):
    """Notes the memory that each op reads and writes."""

    def __init__(self, log: Log, cuda: Cuda) -> None:
        super().__init__()
        self._log, self._cuda = log, cuda

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in _MADE_OF_OPS:  # what it does is what is to be seen
            with self:
                return _MADE_OF_OPS[func](*args, **kwargs)
        out = func(*args, **kwargs)
        name = self._cuda.current_stream().name
        made = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        if func.is_view:
            self._log.numbers(made, name)
            return out
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        written = self._log.numbers([*made, *_written(func, args, kwargs)], name)
        self._log.note("op", name, str(func), reads=self._log.numbers(given, name), writes=written)
        if func is torch.ops.aten._local_scalar_dense.default:
            self._log.note("sync", name)
        return out


def _written(func: Any, args: tuple, kwargs: dict[str, Any]) -> Iterator[Tensor]:
    for at, argument in enumerate(func._schema.arguments):
        if argument.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (x for x in tree_leaves(given) if isinstance(x, Tensor))
