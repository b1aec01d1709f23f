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
from .op_signature import Like, Many, OpSignature, Plain, Same, is_known, tensors
from .stopwatch import typical_seconds
from .work import Work, work_of

MOST_BYTES = 1 << 28  # of one trial; calls that need more are shrunk
MOST_SECONDS = 0.3  # of one call, as estimated; longer calls are shrunk
CACHE_BYTES = 1 << 25  # assumed for a host that does not report its caches
MOST_COPIES = 512  # sets of a call's tensors
# Ops that index a dim of their first float tensor -> this dim, whose length bounds the indices.
_BOUNDS = {"embedding": 0, "index_select": 0, "index": 0, "nll_loss_forward": 1}


class CannotAgain(Exception):
    """Error: a call cannot be made again from its description, so it cannot be timed."""


def op_named(name: str) -> Any:
    """Return the op of a name such as "aten.mm.default".

    Raises:
        CannotAgain: this process has no such op.
    """
    found: Any = torch.ops
    try:
        for part in name.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise CannotAgain(name) from None
    return found


def arguments(call: OpSignature, device: str = "cpu") -> tuple[tuple, dict[str, Any]]:
    """Return new (args, kwargs) that fit the description ``call``, on ``device``.

    Floats are between 0.1 and 1.1. Integers are valid as indices into the call's other tensors. On
    "meta" the tensors have no data.

    Raises:
        CannotAgain: the call had an argument that its description cannot reproduce.
    """
    if not is_known(call):
        raise CannotAgain(call.op)
    bound, made, generator = _bound(call), list[Tensor](), torch.Generator().manual_seed(0)

    def of(x: Any) -> Any:
        if isinstance(x, Like):
            made.append(
                torch.empty_strided(x.shape, x.strides, dtype=x.dtype, device=device)
                if device == "meta"
                else _tensor(x, bound, generator)
            )
            return made[-1]
        if isinstance(x, Same):
            return made[x.index]
        if isinstance(x, Many):
            return [of(each) for each in x.items]
        assert isinstance(x, Plain)
        return torch.device(device) if x.type == "device" else x.value

    return tuple(map(of, call.args)), {name: of(value) for name, value in call.kwargs}


def _bound(call: OpSignature) -> int:
    """Return the exclusive upper bound for random values in the integer tensors of a call.

    Integers below it are valid indices into every tensor of the call; for example, for an embedding
    it is the number of rows of the table.
    """
    name = call.op.split(".")[1]
    given = tensors(call)
    floats = [x for x in given if x.dtype.is_floating_point and x.shape]
    if name in _BOUNDS and floats:
        return max(floats[0].shape[_BOUNDS[name]], 1)
    if name == "embedding_dense_backward":
        return max(call.args[2].value, 1)
    return max(min((n for x in (floats or given) for n in x.shape), default=1), 1)


def _tensor(x: Like, bound: int, generator: torch.Generator) -> Tensor:
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


def shrunk(call: OpSignature, times: int) -> OpSignature:
    """Return a description of the call on smaller tensors, for a call too large for this host.

    The leading dim of its largest tensor becomes ``times`` smaller, and so does every dim of that
    length, and every number of that value in a list.

    Raises:
        CannotAgain: the leading dim is too short.
    """
    largest = max(tensors(call), key=lambda x: x.nbytes, default=None)
    if largest is None or not largest.shape or largest.shape[0] < 2 * times:
        raise CannotAgain(call.op)
    old, new = largest.shape[0], largest.shape[0] // times

    def of(x: Any, listed: bool = False) -> Any:
        if isinstance(x, Like):
            return _resized(x, tuple(new if n == old else n for n in x.shape))
        if isinstance(x, Many):
            return Many(tuple(of(each, True) for each in x.items))
        return x._replace(value=new) if listed and x == Plain("int", old) else x

    kwargs = tuple((name, of(value)) for name, value in call.kwargs)
    return call._replace(args=tuple(map(of, call.args)), kwargs=kwargs, out=of(call.out))


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


def repeated(call: OpSignature, cold: bool = False, device: str = "cpu") -> Callable[[], object]:
    """Return a function that makes the call once each time it runs.

    Args:
        cold: whether to cycle through several sets of tensors, enough that no cache holds a set any
            more when its turn comes again. Otherwise, the tensors are the same each time.
        device: type of the device of the tensors.

    Raises:
        CannotAgain: the call cannot be made.
    """
    keep_freed_memory()  # as every rank of a job does
    func, needed = op_named(call.op), max(bytes_needed(call), 1)
    # One set more than the caches hold.
    count = max(1, min(MOST_COPIES, -(-cache_bytes() // needed))) + 1 if cold else 1
    turns = cycle([arguments(call, device) for _ in range(count)])

    def run() -> object:
        args, kwargs = next(turns)
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


def timed(call: OpSignature, cold: bool = False, device: str = "cpu") -> float:
    """Return the typical seconds of the call, by making it several times.

    ``cold`` and ``device`` say, as in ``repeated``, which tensors are used.

    Raises:
        CannotAgain: the call cannot be made, or it raises.
    """
    with alone():
        run = repeated(call, cold, device)
        try:
            return typical_seconds(run)
        except Exception as error:  # the made-up values may be illegal for an unknown op
            raise CannotAgain(f"{call.op}: {error}") from None


def work(call: OpSignature) -> Work:
    """Return the ``Work`` (flops, bytes) of a call without computing anything, on ``meta`` tensors.

    Raises:
        CannotAgain: the call cannot be made, or torch does not know the shapes of its results.
    """
    with alone():
        func = op_named(call.op)
        args, kwargs = arguments(call, "meta")
        try:
            return work_of(func, args, kwargs, func(*args, **kwargs))
        except Exception as error:
            raise CannotAgain(f"{call.op}: {error}") from None


def bytes_needed(call: OpSignature) -> int:
    """Return the bytes of tensors that must be allocated to time the call."""
    return sum(_span(x) * x.dtype.itemsize for x in (*tensors(call), *tensors(call.out)))


def _span(x: Like) -> int:
    """Return how many elements of memory a tensor spans, with the gaps between its elements."""
    if 0 in x.shape:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(x.shape, x.strides))


@contextmanager
def alone() -> Iterator[None]:
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
