"""Dispatch mode that runs ops without computing: results are CPU tensors whose memory is never
touched ("imagined" tensors).

```
integers, booleans, and what is small,
computed from real tensors               runs (masks, positions, counters: a program may read them)
all other results                        get their shape from torch's `meta` kernel; nothing runs
```

Memory that is never written costs nothing, because the system only provides it when it is touched.
So a tensor may be larger than the machine, and all code that checks its device finds a CPU tensor.
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

from ...cost_model.model import Caller
from ...cost_model.work import Work
from ...dispatch.planning.writes import written_tensors
from ...dispatch.plans.shards import is_global
from ...graph.reads import is_followed, may_be_followed
from ...spec.nested import map_tensors, tensors_in
from ..machines.op_signature import OpSignature
from ..machines.work import work_of
from .cache_model import CacheModel
from .list_ops import RankShare, shares
from .log import Log, SimulatedOp
from .memory import Memory
from .shapes import ResultShape, Shapes, each
from .values import Values

_aten = torch.ops.aten
_Off = torch._C.DisableTorchFunction
_T = torch.Tensor
# Ops on real tensors that make at most so many elements run for real, and take no simulated time.
SMALL = 1 << 14
# Ops that read no values and run as they are. The first three return a tensor on the same memory,
# which their schemas do not say.
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
    """Torch dispatch mode that gives ops imagined results, and notes each op in a log.

    An imagined tensor is a CPU tensor whose memory is never touched, so that it has no values.

    Args:
        log: gets a ``SimulatedOp`` for each op.
        values: source of substitutes for values that the program reads.
        rank_of: function of (placement, tensors) that returns the rank that runs an op on these
            tensors; the placement of plain tensors is None.
        caller: function that returns who calls the op that runs now.
        views: whether to note views too, which take Python time only.
        recency: model of what is in caches; None if no op's time depends on it.
    """

    def __init__(
        self,
        log: Log,
        values: Values,
        rank_of: Callable[[Any, Iterable[Tensor]], int],
        caller: Callable[[], Caller],
        views: bool,
        recency: CacheModel | None = None,
    ) -> None:
        super().__init__()
        self._recency = recency
        self._views = views
        self._log, self._values = log, values
        self._rank_of, self._caller = rank_of, caller
        self.memory = Memory(log)
        self._shapes = Shapes()
        self._passing = 0  # above 0 while this object makes a tensor, by ops that are not logged

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, receiver: int | None = None
    ) -> Tensor:
        """Return an imagined tensor of this shape and dtype.

        With ``receiver``, its memory is logged as the result of a message to the rank ``receiver``.
        The tensor may be written in place.
        """
        self._passing += 1
        try:
            made = _vast(tuple(shape), dtype)
        finally:
            self._passing -= 1
        rank = self._rank_of(None, ()) if receiver is None else receiver
        self.memory.put(made, rank, receiver is not None)
        if self._recency is not None:
            self._recency.made(rank, self._memories([made]))
        return made

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _Off():
            # Views run for real: they must share the storage of their base.
            if self._passing or func.is_view or func in _AS_THEY_ARE:
                if self._views and not self._passing and self.memory.number(args[0]) is not None:
                    rank = self._rank_of(_placement_of(args), args[:1])
                    self._log.events.append(SimulatedOp(rank, VIEW, "", caller=self._caller()))
                return func(*args, **kwargs)
            return self._op(func, args, kwargs)

    def _op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = tensors_in((args, kwargs))
        if kwargs.get("device") == _META or any(map(_is_meta, given)):
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        # Imagined memory has a number; tensors without one have real values.
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
        placement = _placement_of(given)
        self._belong(given, placement)
        found = shares(func, args, lambda at: self._rank_of(_placement_of(at), at))
        found = found or [RankShare(self._rank_of(placement, given))]
        colds = [self._cold(share.rank, tensors_in((share.of(args), kwargs))) for share in found]
        # Programs may read these values, so the op is computed; its simulated time counts all the
        # same.
        if real and _is_known(func, made):
            out = func(*args, **kwargs)
        else:
            out = self._results(func, args, kwargs, made, found[0].rank)
        for share, cold in zip(found, colds, strict=True):
            call = share.of(args), kwargs, share.of(out)
            if len(found) > 1:
                self._give(call, share.rank)
                placement = _placement_of(tensors_in(call))
            self._note(func, call, share.rank, placement, cold)
        return out

    def _note(self, func: Any, call: tuple, rank: int, placement: Any, cold: float) -> None:
        """Log one op of ``rank``.

        Args:
            call: (args, kwargs, result).
            placement: placement of the global tensors in it; None if there are none.
            cold: share of its inputs that no cache holds.
        """
        if placement is not None:  # work counts shards, not logical shapes
            call = map_tensors(call, _shard)
        work = work_of(func, *call)
        self._log.events.append(
            SimulatedOp(rank, work, user_line(), placement, cold, self._caller())
        )

    def _cold(self, rank: int, given: Iterable[Tensor]) -> float:
        return 0.0 if self._recency is None else self._recency.cold(rank, self._memories(given))

    def _belong(self, given: Iterable[Tensor], placement: Any) -> None:
        """Attribute the memory of global tensors in ``given`` to the ranks of their placements."""
        for x in given if placement is not None else ():
            if is_global(x):
                self._give(x, self._rank_of(x._spec.placement, ()))  # type: ignore[attr-defined]

    def _give(self, tensors: Any, rank: int) -> None:
        for x in tensors_in(tensors):
            number = self.memory.number(x)
            if number is not None:
                self.memory.give(number, rank)

    def _memories(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield (number, bytes touched) of the memory of each imagined tensor."""
        for x in tensors:
            number = self.memory.number(x)
            if number is not None:
                whole = _T.untyped_storage(x).nbytes()
                yield number, min(x.numel() * x.itemsize, whole)

    def _results(self, func: Any, args: tuple, kwargs: dict, made: Any, rank: int) -> Any:
        written = written_tensors(func, args, kwargs)
        for x in written:
            self.memory.put(x, rank)
            if func.namespace != "aten":  # for aten ops, torch itself raises the version counter
                torch.autograd.graph.increment_version(x)
        returns = func._schema.returns
        if not returns:
            return None
        aliases = [r.alias_info is not None for r in returns]
        if all(aliases) and written:
            return written[0] if len(returns) == 1 else type(made)(written[: len(returns)])

        def new(x: Any) -> Any:
            if not isinstance(x, ResultShape):
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
# Larger memory is mapped without reserve, so that the system does not check it against its RAM.
_VAST = 1 << 30
# Python has the constant since version 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _strided(x: ResultShape) -> Tensor:
    """Return an imagined tensor of the size and stride that ``x`` describes."""
    if x.numel * x.dtype.itemsize < _VAST:
        return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="cpu")
    reach = 1 + sum((n - 1) * step for n, step in zip(x.size, x.stride, strict=True))
    return _vast((reach,), x.dtype).as_strided(x.size, x.stride)


def _vast(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an imagined tensor of this shape, which may be larger than the memory of this machine.

    It is not a view of another tensor, so that torch allows in-place writes to it.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _VAST:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags), dtype=dtype)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)


def _is_meta(x: Tensor) -> bool:
    return _T.is_meta.__get__(x)  # type: ignore[attr-defined]


def _placement_of(given: Iterable[Any]) -> Any:
    """Return the placement of the first global tensor among ``given``; None without one."""
    return next((x._spec.placement for x in given if is_global(x)), None)


def _shard(x: Tensor) -> Tensor:
    return _T.as_subclass(x, _T) if is_global(x) else x  # type: ignore[arg-type]


def _is_known(func: Any, made: Any) -> bool:
    """Return whether an op on real tensors may be computed, because programs may read its results.

    ``made`` describes these results. The values of ``empty`` and of random ops are never known.
    """
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        return False
    return all(may_be_followed(x.dtype, x.numel) for x in _made_in(made))


def _made_in(made: Any) -> list[ResultShape]:
    found: list[ResultShape] = []
    each(made, lambda x: found.append(x) if isinstance(x, ResultShape) else None)
    return found
