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
from .list_ops import RankShare, split_by_rank
from .log import Log, SimulatedOp
from .memory import Memory
from .shapes import ResultShape, ShapeCache, map_leaves
from .values import Values

_aten = torch.ops.aten
_DisableTorchFunction = torch._C.DisableTorchFunction
_T = torch.Tensor
# Ops on real tensors with results of at most this many elements are run, in no simulated time.
MAX_REAL_NUMEL = 1 << 14
# Ops that read no values and run as they are. The first three return a tensor on the same memory,
# which their schemas do not say.
_RUN_AS_IS = frozenset(
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
        self._cache_model = recency
        self._log_views = views
        self._log, self._values = log, values
        self._rank_of, self._caller = rank_of, caller
        self.memory = Memory(log)
        self._shapes = ShapeCache()
        # Above 0 while this object makes a tensor, by ops that are not logged.
        self._silent = 0

    def empty(
        self, shape: Sequence[int], dtype: torch.dtype, receiver: int | None = None
    ) -> Tensor:
        """Return an imagined tensor of this shape and dtype.

        With ``receiver``, its memory is logged as the result of a message to the rank ``receiver``.
        The tensor may be written in place.
        """
        self._silent += 1
        try:
            out = _imagined_empty(tuple(shape), dtype)
        finally:
            self._silent -= 1
        rank = self._rank_of(None, ()) if receiver is None else receiver
        self.memory.register(out, rank, receiver is not None)
        if self._cache_model is not None:
            self._cache_model.record_write(rank, self._memory_sizes([out]))
        return out

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _DisableTorchFunction():
            # Views run for real: they must share the storage of their base.
            if self._silent or func.is_view or func in _RUN_AS_IS:
                if self._log_views and not self._silent and self.memory.number(args[0]) is not None:
                    rank = self._rank_of(_placement_of(args), args[:1])
                    self._log.events.append(SimulatedOp(rank, VIEW, "", caller=self._caller()))
                return func(*args, **kwargs)
            return self._op(func, args, kwargs)

    def _op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        inputs = tensors_in((args, kwargs))
        if kwargs.get("device") == _META or any(map(_is_meta, inputs)):
            return func(*args, **kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        # Imagined memory has a number; tensors without one have real values.
        is_real = all(self.memory.number(x) is None for x in inputs)
        if not is_real and self._values.reads(func):
            return self._values.read(func, args)
        if inputs and is_real and all(x.numel() <= MAX_REAL_NUMEL for x in inputs):
            return func(*args, **kwargs)
        if is_real and self._values.is_sized(func, args) and all(map(is_followed, inputs)):
            return func(*args, **kwargs)
        result_shapes = self._values.shape_of(func, args, kwargs, self._shapes)
        if is_real and sum(x.numel for x in _shapes_in(result_shapes)) <= MAX_REAL_NUMEL:
            return func(*args, **kwargs)
        placement = _placement_of(inputs)
        self._assign_owners(inputs, placement)
        rank_shares = split_by_rank(
            func, args, lambda tensors: self._rank_of(_placement_of(tensors), tensors)
        )
        rank_shares = rank_shares or [RankShare(self._rank_of(placement, inputs))]
        cold_shares = [
            self._cold_share(share.rank, tensors_in((share.select(args), kwargs)))
            for share in rank_shares
        ]
        # Programs may read these values, so the op is computed; its simulated time counts all the
        # same.
        if is_real and _has_known_values(func, result_shapes):
            out = func(*args, **kwargs)
        else:
            out = self._imagined_results(func, args, kwargs, result_shapes, rank_shares[0].rank)
        for share, cold in zip(rank_shares, cold_shares, strict=True):
            call = share.select(args), kwargs, share.select(out)
            if len(rank_shares) > 1:
                self._assign_rank(call, share.rank)
                placement = _placement_of(tensors_in(call))
            self._log_op(func, call, share.rank, placement, cold)
        return out

    def _log_op(self, func: Any, call: tuple, rank: int, placement: Any, cold: float) -> None:
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

    def _cold_share(self, rank: int, inputs: Iterable[Tensor]) -> float:
        return (
            0.0
            if self._cache_model is None
            else self._cache_model.cold_share_of_read(rank, self._memory_sizes(inputs))
        )

    def _assign_owners(self, inputs: Iterable[Tensor], placement: Any) -> None:
        """Attribute the memory of global tensors in ``inputs`` to the ranks of their placements."""
        for x in inputs if placement is not None else ():
            if is_global(x):
                self._assign_rank(x, self._rank_of(x._spec.placement, ()))  # type: ignore[attr-defined]

    def _assign_rank(self, tensors: Any, rank: int) -> None:
        for x in tensors_in(tensors):
            number = self.memory.number(x)
            if number is not None:
                self.memory.set_rank(number, rank)

    def _memory_sizes(self, tensors: Iterable[Tensor]) -> Iterator[tuple[int, int]]:
        """Yield (number, bytes touched) of the memory of each imagined tensor."""
        for x in tensors:
            number = self.memory.number(x)
            if number is not None:
                storage_bytes = _T.untyped_storage(x).nbytes()
                yield number, min(x.numel() * x.itemsize, storage_bytes)

    def _imagined_results(
        self, func: Any, args: tuple, kwargs: dict, result_shapes: Any, rank: int
    ) -> Any:
        written = written_tensors(func, args, kwargs)
        for x in written:
            self.memory.register(x, rank)
            if func.namespace != "aten":  # for aten ops, torch itself raises the version counter
                torch.autograd.graph.increment_version(x)
        returns = func._schema.returns
        if not returns:
            return None
        aliases = [r.alias_info is not None for r in returns]
        if all(aliases) and written:
            return written[0] if len(returns) == 1 else type(result_shapes)(written[: len(returns)])

        def imagined_result(x: Any) -> Any:
            if not isinstance(x, ResultShape):
                return x
            self._silent += 1
            try:
                out = _imagined_strided(x)
            finally:
                self._silent -= 1
            self.memory.register(out, rank)
            if self._cache_model is not None:
                self._cache_model.record_write(rank, self._memory_sizes([out]))
            return out

        return map_leaves(result_shapes, imagined_result)


_META = torch.device("meta")
# Larger memory is mapped without reserve, so that the system does not check it against its RAM.
_MMAP_BYTES = 1 << 30
# Python has the constant since version 3.13.
_NO_RESERVE = getattr(mmap, "MAP_NORESERVE", 0x4000 if sys.platform == "linux" else 0)


def _imagined_strided(x: ResultShape) -> Tensor:
    """Return an imagined tensor of the size and stride that ``x`` describes."""
    if x.numel * x.dtype.itemsize < _MMAP_BYTES:
        return torch.empty_strided(x.size, x.stride, dtype=x.dtype, device="cpu")
    reach = 1 + sum((n - 1) * step for n, step in zip(x.size, x.stride, strict=True))
    return _imagined_empty((reach,), x.dtype).as_strided(x.size, x.stride)


def _imagined_empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return an imagined tensor of this shape, which may be larger than the memory of this machine.

    It is not a view of another tensor, so that torch allows in-place writes to it.
    """
    nbytes = torch.Size(shape).numel() * dtype.itemsize
    if nbytes < _MMAP_BYTES:
        return torch.empty(shape, dtype=dtype, device="cpu")
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE
    flat = torch.frombuffer(mmap.mmap(-1, nbytes, flags), dtype=dtype)
    strides = torch.empty(shape, dtype=dtype, device="meta").stride()
    return torch.empty(0, dtype=dtype).set_(flat.untyped_storage(), 0, shape, strides)


def _is_meta(x: Tensor) -> bool:
    return _T.is_meta.__get__(x)  # type: ignore[attr-defined]


def _placement_of(tensors: Iterable[Any]) -> Any:
    """Return the placement of the first global tensor among ``tensors``; None without one."""
    return next((x._spec.placement for x in tensors if is_global(x)), None)


def _shard(x: Tensor) -> Tensor:
    return _T.as_subclass(x, _T) if is_global(x) else x  # type: ignore[arg-type]


def _has_known_values(func: Any, result_shapes: Any) -> bool:
    """Return whether an op on real tensors may be computed, because programs may read its results.

    ``result_shapes`` describes these results. The values of ``empty`` and of random ops are never
    known.
    """
    if torch.Tag.nondeterministic_seeded in func.tags or "empty" in func._schema.name:
        return False
    return all(may_be_followed(x.dtype, x.numel) for x in _shapes_in(result_shapes))


def _shapes_in(result_shapes: Any) -> list[ResultShape]:
    shapes: list[ResultShape] = []
    map_leaves(result_shapes, lambda x: shapes.append(x) if isinstance(x, ResultShape) else None)
    return shapes
