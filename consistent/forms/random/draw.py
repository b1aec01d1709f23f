"""Random values of global tensors: each is a function of (seed, op counter, logical index).

So they do not depend on the layout. Every op takes one key (seed, op counter) on every rank, also
on ranks that hold ``meta`` shards, so that the counters agree. If the user passes ``generator=``,
the key is drawn from that generator, which all ranks must have seeded with the same seed.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from ...movement.check_mode import digest
from ...movement.grad_mode import records
from ...movement.world import my_coordinate
from ...spec import Coordinate, P, Placement, TensorSpec
from ..native import load
from ..refused import require
from ..registry import Shards, form
from ..seeds import signed_seed
from . import generator
from .generator import RngState

_NATIVE_DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def key_from(
    user_generator: torch.Generator | None, op_name: str, placement: Placement | None
) -> RngState:
    """Return the random key (seed, counter) of one op, which determines all numbers it draws.

    It comes from the global random state, or is drawn from the user's generator.

    Args:
        user_generator: the user's generator, or None.
        op_name: name of the op.
        placement: placement of the op's tensor, or None if the op draws nothing.

    Raises:
        RuntimeError: ranks of ``placement`` are about to draw different numbers.
    """
    if user_generator is None:
        seed, counter = generator.next_key(op_name, placement)
        return RngState(signed_seed(seed), counter)
    _compare_generators(user_generator, op_name, placement)
    return RngState(
        int(torch.randint(1 << 62, (), generator=user_generator, device=user_generator.device)), 0
    )


def key_of(shard: Shards) -> RngState:
    """Return the random key of the call that a form runs.

    It is drawn from the call's ``generator=`` if there is one.
    """
    return key_from(shard.kwargs.get("generator"), shard.call.name, shard.placement)


def _compare_generators(
    user_generator: torch.Generator, op_name: str, placement: Placement | None
) -> None:
    """Raise on all ranks if they would draw different numbers from ``user_generator``.

    Only the first few calls of ``op_name`` compare.
    """

    def state() -> str:
        return (
            f"generator= of seed {user_generator.initial_seed()}, "
            f"{digest(user_generator.get_state())}"
        )

    generator.compare(op_name, placement, state)


def fill(
    draw: Callable[..., Any], x: Tensor, spec: TensorSpec, key: RngState, *params: Any
) -> None:
    """Fill ``x``, this rank's shard of a tensor with ``spec``, by the native op ``draw``.

    On a P axis the first rank gets the values, and the others get zeros. ``params`` are the
    arguments of ``draw`` after the tensor, such as mean and standard deviation.
    """
    coordinate = my_coordinate(spec.placement)
    if coordinate is None:
        return
    if not _holds_values(spec, coordinate):
        x.zero_()
        return
    if not spec.layout.is_cut:
        _fill_box(draw, x, spec.region(coordinate)[0], spec, key, *params)
        return
    for starts, place in boxes(spec, coordinate):
        values = torch.empty_like(x[place], memory_format=torch.contiguous_format)
        box_params = [p[place] if isinstance(p, Tensor) and p.ndim else p for p in params]
        _fill_box(draw, values, starts, spec, key, *box_params)
        x[place] = values


def boxes(spec: TensorSpec, at: Coordinate) -> Iterator[tuple[tuple[int, ...], tuple[slice, ...]]]:
    """Yield the contiguous boxes of the logical tensor that the rank at coordinate ``at`` holds.

    Each as (starts in the logical tensor, slices of the shard). Without a cut there is one box.
    """
    by_dim = []
    for runs in spec.runs(at):
        ends = [0, *itertools.accumulate(size for _, size in runs)]
        by_dim.append([(run[0], slice(a, b)) for run, a, b in zip(runs, ends, ends[1:])])
    for box in itertools.product(*by_dim):
        yield tuple(start for start, _ in box), tuple(place for _, place in box)


def _fill_box(
    draw: Callable[..., Any],
    x: Tensor,
    starts: Sequence[int],
    spec: TensorSpec,
    key: RngState,
    *params: Any,
) -> None:
    """Fill ``x``, a box that begins at index ``starts`` of the logical tensor, by ``draw``.

    ``draw`` and ``params`` are as in ``fill``. Dtypes that the native ops lack are drawn in
    float32.
    """
    sizes = tuple(spec.shape)
    key_arguments = {"seed": key.seed, "counter": key.counter}
    if x.is_complex():
        draw(
            torch.view_as_real(x),
            *params,
            **key_arguments,
            starts=(*starts, 0),
            logical_sizes=(*sizes, 2),
        )
    elif x.is_floating_point() and x.dtype not in _NATIVE_DTYPES:
        wider = torch.empty(x.shape, dtype=torch.float32, device=x.device)
        x.copy_(draw(wider, *params, **key_arguments, starts=starts, logical_sizes=sizes))
    else:
        draw(x, *params, **key_arguments, starts=starts, logical_sizes=sizes)


def _holds_values(spec: TensorSpec, coordinate: Coordinate) -> bool:
    """Return whether the rank at ``coordinate`` holds the values of a random P tensor.

    The first rank on each P axis does; the others hold zeros.
    """
    return not any(entry is P and step for entry, step in zip(spec.sbp, coordinate, strict=True))


# -- in place --------------------------------------------------------------------------------------


@form("random_fill")
def random_fill(shard: Shards) -> Tensor:
    """Run ``x.uniform_()``, ``x.normal_()`` and similar ops, and ``bernoulli(x)``, on the shard.

    ``bernoulli(x)`` reads ``x`` as probabilities.
    """
    x, spec, call = shard.tensors[0], shard.outs[0], shard.call
    key = key_of(shard)
    if call.inplace and not records((x,)):
        out = x
    else:
        # Numbers are drawn outside autograd. An in-place op on a tensor that autograd tracks copies
        # them into it, so that autograd sees the write.
        out = torch.empty_like(x, requires_grad=False)
    _FILLS[call.name](shard, out, spec, key)
    if call.inplace and out is not x:
        x.copy_(out)
        return x
    return out if call.inplace else _with_zero_gradient(out, x)


class _ZeroGradient(torch.autograd.Function):
    """Identity on drawn numbers, with a gradient of 0 for the tensors that parametrize the draw.

    Torch has this gradient too. ``sources`` are these tensors, such as the mean of
    ``torch.normal``.
    """

    @staticmethod
    def forward(ctx: Any, out: Tensor, *sources: Tensor) -> Tensor:
        ctx.shapes = [x.shape for x in sources]
        ctx.mark_dirty(out)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(grad.new_zeros(shape) for shape in ctx.shapes)


def _with_zero_gradient(out: Tensor, *sources: Tensor) -> Tensor:
    return _ZeroGradient.apply(out, *sources) if records(sources) else out


def fill_normal(
    x: Tensor, spec: TensorSpec, key: RngState, mean: Any = 0.0, std: Any = 1.0
) -> None:
    """Fill ``x``, this rank's shard, with normal values.

    Real and imaginary part of a complex value have half of the variance each.
    """
    if x.is_complex():
        fill(load.normal_, x, spec, key, 0.0, std / math.sqrt(2))
        coordinate = my_coordinate(spec.placement)
        # On a P axis only the first rank holds values, so only that rank adds the mean.
        if mean and coordinate is not None and _holds_values(spec, coordinate):
            x.add_(mean)
    else:
        fill(load.normal_, x, spec, key, mean, std)


def fill_integers(x: Tensor, spec: TensorSpec, key: RngState, low: int, high: int) -> None:
    """Fill ``x``, this rank's shard, with random integers of [low, high).

    ``spec`` is that of the global tensor, and ``key`` the random key of the op.
    """
    fill(load.randint_, x, spec, key, low, high)


def fill_uniform(
    x: Tensor, spec: TensorSpec, key: RngState, low: Any = 0.0, high: Any = 1.0
) -> None:
    """Fill ``x``, this rank's shard, with uniform numbers of [low, high).

    ``spec`` is that of the global tensor, and ``key`` the random key of the op.
    """
    fill(load.uniform_, x, spec, key, low, high)


def permutation(n: int, key: RngState, device: torch.device) -> Tensor:
    """Return the integers 0 to n - 1 in a random order that is the same on every rank.

    ``key`` determines the order.
    """
    seed, counter = key
    return load.randperm(n, seed=seed, counter=counter, device=device)


def _fill_bernoulli(shard: Shards, x: Tensor, spec: TensorSpec, key: RngState) -> None:
    p = shard.get("p", None if not shard.call.inplace else 0.5)
    probability = shard.tensors[0].detach() if p is None else p
    if isinstance(probability, Tensor):
        probability = probability.detach().expand(x.shape)
        text = f"{shard.call.name}: a probability lies between 0 and 1, and some of p do not"
        require(((probability >= 0) & (probability <= 1)).all(), f"{text}. Pass p.clamp(0, 1).")
    fill(load.bernoulli_, x, spec, key, probability)


def _fill_random(shard: Shards, x: Tensor, spec: TensorSpec, key: RngState) -> None:
    """Fill ``x`` for random_(), random_(to) or random_(from, to).

    Without ``to`` the values go up to the largest integer below which the dtype holds all integers
    exactly.
    """
    low, high = shard.get("from", 0), shard.get("to")
    if len(shard.args) == 2 and "to" not in shard.kwargs:
        low, high = 0, low
    if high is None:
        high = _integer_limit(x.dtype)
    fill_integers(x, spec, key, low, high)


def _integer_limit(dtype: torch.dtype) -> int:
    if dtype is torch.bool:
        return 2
    if dtype.is_floating_point:
        return round(2 / torch.finfo(dtype).eps) + 1  # integers up to 2 / eps are exact
    return min(torch.iinfo(dtype).max + 1, (1 << 63) - 1)


def _fill_by(draw: Callable[..., Any], **params: float) -> Callable[..., None]:
    """Return a function that fills a form's output by ``draw``, with parameters read from the call.

    ``params`` has their names in torch's signature and torch's defaults, as ``mean=0.0, std=1.0``.
    """

    def run(shard: Shards, x: Tensor, spec: TensorSpec, key: RngState) -> None:
        # ``from`` is a Python keyword, hence the trailing underscore in the parameter's name.
        values = [shard.get(name.rstrip("_"), default) for name, default in params.items()]
        draw(x, spec, key, *values)

    return run


def _native_fill(draw: Callable[..., Any]) -> Callable[..., None]:
    def run(x: Tensor, spec: TensorSpec, key: RngState, *params: Any) -> None:
        fill(draw, x, spec, key, *params)

    return run


_FILLS: dict[str, Callable[..., None]] = {
    "bernoulli": _fill_bernoulli,
    "cauchy": _fill_by(_native_fill(load.cauchy_), median=0.0, sigma=1.0),
    "exponential": _fill_by(_native_fill(load.exponential_), lambd=1.0),
    "geometric": _fill_by(_native_fill(load.geometric_), p=0.5),
    "log_normal": _fill_by(_native_fill(load.log_normal_), mean=1.0, std=2.0),
    "normal": _fill_by(fill_normal, mean=0.0, std=1.0),
    "random": _fill_random,
    "uniform": _fill_by(fill_uniform, from_=0.0, to=1.0),
}


# -- new tensors -----------------------------------------------------------------------------------


@form("random_like")
def random_like(shard: Shards) -> Tensor:
    """Run rand_like, randn_like or randint_like, which read only the operand's shape."""
    spec = shard.outs[0]
    key = key_of(shard)
    out = torch.empty(shard.out_shape(), dtype=spec.dtype, device=shard.tensors[0].device)
    if shard.call.name == "rand_like":
        fill_uniform(out, spec, key)
    elif shard.call.name == "randn_like":
        fill_normal(out, spec, key)
    else:
        low, high = shard.get("low"), shard.get("high")
        fill_integers(out, spec, key, *((0, low) if high is None else (low, high)))
    return out.requires_grad_(bool(shard.kwargs.get("requires_grad")))


@form("normal_of")
def normal_of(shard: Shards) -> Tensor:
    """Run torch.normal(mean, std) where ``mean``, ``std`` or both are tensors.

    Their gradient is 0, as in torch.
    """
    mean, std = (
        *shard.args,
        *(shard.kwargs[n] for n in ("mean", "std") if n in shard.kwargs),
        1.0,
    )[:2]
    spec = shard.outs[0]
    key = key_of(shard)
    out = torch.empty(shard.out_shape(), dtype=spec.dtype, device=shard.tensors[0].device)
    fill_normal(out, spec, key)
    if isinstance(std, Tensor):
        require((std.detach() >= 0).all(), "normal expects all elements of std >= 0.0")
    with torch.no_grad():
        out.mul_(std).add_(mean)
    return _with_zero_gradient(out, *shard.tensors)


# -- torch's own drawing, seeded alike -------------------------------------------------------------


@form("seeded")
def seeded(shard: Shards) -> Any:
    """Run an op whose numbers torch itself draws, such as ``multinomial`` or ``poisson``.

    It runs on whole tensors, with torch's generators seeded alike on every rank.
    """
    user_generator = shard.kwargs.get("generator")
    if user_generator is not None:
        _compare_generators(user_generator, shard.call.name, shard.placement)
        return shard.run(*shard.args, **shard.kwargs)
    with seeded_generators(key_of(shard), [t.device for t in shard.tensors]):
        return shard.run(*shard.args, **shard.kwargs)


# Simulated ranks are threads that share torch's generators, so only one may seed them at a time.
_torch_generators = threading.RLock()


class _Seeding(threading.local):
    depth: int = 0


_seeding = _Seeding()


def is_seeding() -> bool:
    """Return whether this thread runs an op for which ``seeded`` has seeded torch's generators."""
    return _seeding.depth > 0


@contextmanager
def seeded_generators(key: RngState, devices: Sequence[torch.device]) -> Iterator[None]:
    """Seed torch's generators for these devices from ``key`` inside the block.

    Their states are restored afterwards.
    """
    generators = [torch.default_generator]
    generators += [torch.cuda.default_generators[d.index] for d in set(devices) if d.type == "cuda"]
    # Multiplied by a large odd number, so that neighbouring keys give seeds that are far apart.
    seed = (key.seed + (key.counter + 1) * 0x9E3779B97F4A7C15) & 0x7FFF_FFFF_FFFF_FFFF
    with _torch_generators:
        states = [g.get_state() for g in generators]
        try:
            for g in generators:
                g.manual_seed(seed)
            _seeding.depth += 1
            yield
        finally:
            _seeding.depth -= 1
            for g, state in zip(generators, states, strict=True):
                g.set_state(state)
