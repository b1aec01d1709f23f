"""Ops whose results are imagined: tensors on the CPU that have a size, and memory that is never
touched.

```
whole numbers, truths, and what is small,
computed from what is real               runs (masks, positions, counters: a program may ask)
all else                                 its shape is asked of torch's `meta` kernel; nothing runs
```

Memory that no one writes to costs nothing: the system gives it out when it is touched. So a tensor
may be larger than the machine, and everything that asks where it lies finds a CPU tensor.
"""

from __future__ import annotations

import mmap
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from mirrored.transports.faults.place import user_line

from ...dispatch.planning.writes import written_tensors
from ...dispatch.plans.shards import is_global
from ...graph.reads import is_followed, may_be_followed
from ...spec.nested import map_tensors, tensors_in
from ..machines.op_signature import OpSignature
from ..machines.work import Work, work_of
from .cache_model import CacheModel
from .log import Log, Op
from .memory import Memory
from .shapes import Made, Shapes, each
from .values import Values

_aten = torch.ops.aten
_Off = torch._C.DisableTorchFunction
_T = torch.Tensor
# The most elements that an op on real tensors makes and still runs, and no time is counted.
SMALL = 1 << 14
# These look at no values; the first three give a tensor on the same memory, which their schemas
# do not say.
_AS_THEY_ARE = frozenset(
    (
        _aten._unsafe_view.default,
        _aten.lift_fresh.default,
        _aten.lift.default,
        _aten._fused_sdp_choice.default,
    )
)


VIEW = Work("view", "view", torch.float32, 0.0, 0, OpSignature("view", (), (), None))


class Imagined(TorchDispatchMode):
    """Imagines what ops give, and notes each.

    Args:
        rank_of: placement or None -> the rank that does an op on tensors of it.
        views: note them too: they take Python's time alone.
        recency: tells what is in caches; None if no op's time depends on it.
    """

    def __init__(
        self,
        log: Log,
        values: Values,
        rank_of: Callable[[Any], int],
        views: bool,
        recency: CacheModel | None = None,
    ) -> None:
        super().__init__()
        self._recency = recency
        self._views = views
        self._log, self._values, self._rank_of = log, values, rank_of
        self.memory = Memory(log)
        self._shapes = Shapes()
        self._passing = 0

    def empty(self, shape: Sequence[int], dtype: torch.dtype, received: bool = False) -> Tensor:
        """A tensor without values."""
        self._passing += 1
        try:
            made = _vast(tuple(shape), dtype)
        finally:
            self._passing -= 1
        rank = self._rank_of(None)
        self.memory.put(made, rank, received)
        if self._recency is not None:
            self._recency.made(rank, self._memories([made]))
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _Off():
            if self._passing or func.is_view or func in _AS_THEY_ARE:
                if self._views and not self._passing and self.memory.number(args[0]) is not None:
                    self._log.events.append(Op(self._rank_of(None), VIEW, ""))
                return func(*args, **kwargs)
            return self._op(func, args, kwargs)

    def _op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        if kwargs.get("device") == _META or any(map(_is_meta, given)):
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        real = all(self.memory.number(x) is None for x in given)
        if not real and self._values.reads(func):
            return self._values.read(func, args)
        if given and real and all(x.numel() <= SMALL for x in given):
            return func(*args, **kwargs)
        if real and self._values.is_sized(func, args) and all(map(is_followed, given)):
            return func(*args, **kwargs)
        made = self._values.shape_of(func, args, kwargs, self._shapes)
        if real and sum(x.numel for x in _made_in(made)) <= SMALL:
            return func(*args, **kwargs)
        placement = next((x._spec.placement for x in given if is_global(x)), None)
        rank = self._rank_of(placement)
        cold = 0.0 if self._recency is None else self._recency.cold(rank, self._memories(given))
        if real and _is_known(func, made):
            out = func(*args, **kwargs)
        else:
            out = self._results(func, args, kwargs, made, rank)
        if placement is not None:  # which tells its logical shape
            args, kwargs, shards = map_tensors((args, kwargs, out), _shard)
            work = work_of(func, args, kwargs, shards)
        else:
            work = work_of(func, args, kwargs, out)
        self._log.events.append(Op(rank, work, user_line(), placement, cold))
        return out

    def _memories(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """(number, bytes that are touched) of each."""
        for x in tensors:
            number = self.memory.number(x)
            if number is not None:
                whole = _T.untyped_storage(x).nbytes()
                yield number, min(x.numel() * x.itemsize, whole)

    def _results(self, func: Any, args: tuple, kwargs: dict, made: Any, rank: int) -> Any:
        written = written_tensors(func, args, kwargs)
        for x in written:
            self.memory.put(x, rank)
            if func.namespace != "aten":  # torch counts the writes of its own ops
                torch.autograd.graph.increment_version(x)
        returns = func._schema.returns
        if not returns:
            return None
        aliases = [r.alias_info is not None for r in returns]
        if all(aliases) and written:
            return written[0] if len(returns) == 1 else type(made)(written[: len(returns)])

        def new(x: Any) -> Any:
            if not isinstance(x, Made):
                return x
            self._passing += 1
            try:
                out = _strided(x)
            finally:
                self._passing -= 1
            self.memory.put(out, rank)
            if self._recency is not None:
                self._recency.made(rank, self._memories([out]))
            return out

        return each(made, new)


_META = torch.device("meta")
# Larger memory is asked for in a way that the system does not compare with what it has.
_VAST = 1 << 30
# Python has had the name since 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _strided(x: Made) -> Tensor:
    """Memory of this size and stride."""
    if x.numel * x.dtype.itemsize < _VAST:
        return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="cpu")
    reach = 1 + sum((n - 1) * step for n, step in zip(x.size, x.stride, strict=True))
    return _vast((reach,), x.dtype).as_strided(x.size, x.stride)


def _vast(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """A tensor of this shape, which is not a view: what is received may be written in place."""
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _VAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags), dtype=dtype)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)


def _is_meta(x: Tensor) -> bool:
    return _T.is_meta.__get__(x)  # type: ignore[attr-defined]


def _shard(x: Tensor) -> Tensor:
    return _T.as_subclass(x, _T) if is_global(x) else x  # type: ignore[arg-type]


def _is_known(func: Any, made: Any) -> bool:
    """Whether recorders follow the values of what an op makes of real tensors. Those of `empty` and
    random numbers follow from nothing."""
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        return False
    return all(may_be_followed(x.dtype, x.numel) for x in _made_in(made))


def _made_in(made: Any) -> list[Made]:
    found: list[Made] = []
    each(made, lambda x: found.append(x) if isinstance(x, Made) else None)
    return found
