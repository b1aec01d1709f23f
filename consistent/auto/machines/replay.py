"""Replay of recorded op calls on new tensors of the recorded sizes, strides and dtypes, to time
them."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mirrored.freed_memory import keep_freed_memory

from ...dispatch.planning.without_modes import without_modes
from .op_signature import Like, Many, OpSignature, Plain, Same, is_replayable, tensors_of
from .stopwatch import typical_seconds
from .work import Work, work_of

MAX_BYTES = 1 << 28  # of one trial; calls that need more are shrunk
MAX_SECONDS = 0.3  # of one call, as estimated; longer calls are shrunk
CACHE_BYTES = 1 << 25  # assumed for a host that does not report its caches
MAX_COPIES = 512  # sets of a call's tensors
# Ops that index a dim of their first float tensor -> this dim, whose length bounds the indices.
_BOUNDS = {"embedding": 0, "index_select": 0, "index": 0, "nll_loss_forward": 1}


class CannotReplay(Exception):
    """Error: a call cannot be made again from its description, so it cannot be timed."""


def find_op(name: str) -> Any:
    """Return the op of a name such as "aten.mm.default".

    Raises:
        CannotReplay: this process has no such op.
    """
    op: Any = torch.ops
    try:
        for part in name.split("."):
            op = getattr(op, part)
    except AttributeError:
        raise CannotReplay(name) from None
    return op


def new_arguments(call: OpSignature, device: str = "cpu") -> tuple[tuple, dict[str, Any]]:
    """Return new (args, kwargs) that fit the description ``call``, on ``device``.

    Floats are between 0.1 and 1.1. Integers are valid as indices into the call's other tensors. On
    "meta" the tensors have no data.

    Raises:
        CannotReplay: the call had an argument that its description cannot reproduce.
    """
    if not is_replayable(call):
        raise CannotReplay(call.op)
    bound, new_tensors, generator = (
        _index_bound(call),
        list[Tensor](),
        torch.Generator().manual_seed(0),
    )

    def new_value(x: Any) -> Any:
        if isinstance(x, Like):
            new_tensors.append(
                torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device)
                if device == "meta"
                else _random_tensor(x, bound, generator)
            )
            return new_tensors[-1]
        if isinstance(x, Same):
            return new_tensors[x.index]
        if isinstance(x, Many):
            return [new_value(item) for item in x.items]
        assert isinstance(x, Plain)
        return torch.device(device) if x.type == "device" else x.value

    return tuple(map(new_value, call.args)), {name: new_value(value) for name, value in call.kwargs}


def _index_bound(call: OpSignature) -> int:
    """Return the exclusive upper bound for random values in the integer tensors of a call.

    Integers below it are valid indices into every tensor of the call; for example, for an embedding
    it is the number of rows of the table.
    """
    name = call.op.split(".")[1]
    inputs = tensors_of(call)
    floats = [x for x in inputs if x.dtype.is_floating_point and x.shape]
    if name in _BOUNDS and floats:
        return max(floats[0].shape[_BOUNDS[name]], 1)
    if name == "embedding_dense_backward":
        return max(call.args[2].value, 1)
    return max(min((n for x in (floats or inputs) for n in x.shape), default=1), 1)


def _random_tensor(x: Like, bound: int, generator: torch.Generator) -> Tensor:
    if 0 in x.shape:
        return torch.empty_strided(x.shape, x.strides, dtype=x.dtype)
    span = _span(x)
    if x.dtype.is_floating_point or x.dtype.is_complex:
        flat = torch.rand(span, generator=generator).add_(0.1).to(x.dtype)
    else:
        # 127 fits every integer dtype; int32 and int64 hold any index.
        limit = 2 if x.dtype == torch.bool else min(bound, 127)
        limit = bound if x.dtype in (torch.int64, torch.int32) else limit
        flat = torch.randint(limit, (span,), generator=generator).to(x.dtype)
    return flat.as_strided(x.shape, x.strides)


def shrink_call(call: OpSignature, times: int) -> OpSignature:
    """Return a description of the call on smaller tensors, for a call too large for this host.

    The leading dim of its largest tensor becomes ``times`` smaller, and so does every dim of that
    length, and every number of that value in a list.

    Raises:
        CannotReplay: the leading dim is too short.
    """
    largest = max(tensors_of(call), key=lambda x: x.nbytes, default=None)
    if largest is None or not largest.shape or largest.shape[0] < 2 * times:
        raise CannotReplay(call.op)
    old, new = largest.shape[0], largest.shape[0] // times

    def shrink(x: Any, listed: bool = False) -> Any:
        if isinstance(x, Like):
            return _resized(x, tuple(new if n == old else n for n in x.shape))
        if isinstance(x, Many):
            return Many(tuple(shrink(item, True) for item in x.items))
        return x._replace(value=new) if listed and x == Plain("int", old) else x

    kwargs = tuple((name, shrink(value)) for name, value in call.kwargs)
    return call._replace(args=tuple(map(shrink, call.args)), kwargs=kwargs, out=shrink(call.out))


def _resized(x: Like, shape: tuple[int, ...]) -> Like:
    """Return ``x`` in another shape, without gaps, with its dims in the same order in memory.

    An expanded dim stays expanded.
    """
    if shape == x.shape:
        return x
    strides, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (x.strides[d], -d)):
        if x.strides[dim]:
            strides[dim] = step
            step *= shape[dim]
    return Like(x.dtype, shape, tuple(strides))


def replay_function(
    call: OpSignature, cold: bool = False, device: str = "cpu"
) -> Callable[[], object]:
    """Return a function that makes the call once each time it runs.

    Args:
        cold: whether to cycle through several sets of tensors, enough that no cache holds a set any
            more when its turn comes again. Otherwise, the tensors are the same each time.
        device: type of the device of the tensors.

    Raises:
        CannotReplay: the call cannot be made.
    """
    keep_freed_memory()  # as every rank of a job does
    func, call_bytes = find_op(call.op), max(bytes_needed(call), 1)
    # One set more than the caches hold.
    count = max(1, min(MAX_COPIES, -(-cache_bytes() // call_bytes))) + 1 if cold else 1
    argument_sets = cycle([new_arguments(call, device) for _ in range(count)])

    def run() -> object:
        args, kwargs = next(argument_sets)
        return func(*args, **kwargs)

    return run


@lru_cache
def cache_bytes() -> int:
    """Return the bytes that the largest caches of this host hold together.

    In a virtual machine sysconf(3) reports the caches of the whole processor, of which the guest
    has some cores.
    """
    largest: dict[int, dict[str, int]] = {}  # level -> the cores that share a cache -> its bytes
    for cache in Path("/sys/devices/system/cpu").glob("cpu[0-9]*/cache/index*"):
        with contextlib.suppress(OSError, ValueError):
            level, size, cores = (
                (cache / name).read_text().strip() for name in ("level", "size", "shared_cpu_list")
            )
            largest.setdefault(int(level), {})[cores] = int(size.removesuffix("K")) << 10
    if largest:
        return sum(largest[max(largest)].values())
    with contextlib.suppress(OSError, ValueError):
        return os.sysconf("SC_LEVEL3_CACHE_SIZE") or CACHE_BYTES
    return CACHE_BYTES


def time_call(call: OpSignature, cold: bool = False, device: str = "cpu") -> float:
    """Return the typical seconds of the call, by making it several times.

    ``cold`` and ``device`` say, as in ``replay_function``, which tensors are used.

    Raises:
        CannotReplay: the call cannot be made, or it raises.
    """
    with without_modes_and_grad():
        run = replay_function(call, cold, device)
        try:
            return typical_seconds(run)
        except Exception as error:  # the made-up values may be illegal for an unknown op
            raise CannotReplay(f"{call.op}: {error}") from None


def work_on_meta(call: OpSignature) -> Work:
    """Return the ``Work`` (flops, bytes) of a call without computing anything, on ``meta`` tensors.

    Raises:
        CannotReplay: the call cannot be made, or torch does not know the shapes of its results.
    """
    with without_modes_and_grad():
        func = find_op(call.op)
        args, kwargs = new_arguments(call, "meta")
        try:
            return work_of(func, args, kwargs, func(*args, **kwargs))
        except Exception as error:
            raise CannotReplay(f"{call.op}: {error}") from None


def bytes_needed(call: OpSignature) -> int:
    """Return the bytes of tensors that must be allocated to time the call."""
    return sum(_span(x) * x.dtype.itemsize for x in (*tensors_of(call), *tensors_of(call.out)))


def _span(x: Like) -> int:
    """Return how many elements of memory a tensor spans, with the gaps between its elements."""
    if 0 in x.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides))


@contextmanager
def without_modes_and_grad() -> Iterator[None]:
    """Run ops inside the ``with`` block without modes, autocast and autograd.

    Dispatch modes and function modes of the program are inactive meanwhile, and its random state
    does not change.
    """
    with (
        without_modes(),
        torch.no_grad(),
        torch.autocast("cpu", enabled=False),
        torch.random.fork_rng(devices=[]),
    ):
        yield
