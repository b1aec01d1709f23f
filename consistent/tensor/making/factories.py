"""Factories of global tensors: torch's factories with ``placement=`` and ``sbp=``.

Sizes, dtypes and the errors for wrong arguments are torch's own, found by a run on ``meta``. If the
SBP is S (sharded), each rank makes only its shard; if it is P (partial sum), the first rank holds
the value and the others zeros. Random values depend on seed, op and logical index and on nothing
else. The ``*_like`` and ``new_*`` functions of torch work on global tensors as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mirrored.transports.failures import counts_out_of_memory

from ...dispatch.plans.shards import attach, check_partial
from ...forms.random.draw import fill_integers, fill_normal, fill_uniform, key_from, permutation
from ...movement.differentiable import shard_of_plain
from ...movement.recut import indices_of_runs
from ...movement.world import device_of, my_coordinate
from ...spec import P, Placement, SbpLike, TensorSpec
from .create import check_world, distribute
from .scope import resolved_placement

# (local shard, spec) -> None: writes this rank's values into the shard.
Fill = Callable[[torch.Tensor, TensorSpec], Any]


def zeros(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.zeros(*size)`` as a global tensor: ``zeros(4, 3, placement=p, sbp=S(0))``.

    ``options`` are the keyword arguments of torch's function, such as ``dtype``.
    """
    return _make_filled(torch.zeros, size, placement, sbp, options, lambda x, spec: x.zero_())


def ones(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.ones(*size)`` as a global tensor: ``ones(4, 3, placement=p, sbp=S(0))``.

    ``options`` are the keyword arguments of torch's function, such as ``dtype``.
    """
    return _make_filled(
        torch.ones, size, placement, sbp, options, _fill_first_addend(lambda x, spec: x.fill_(1))
    )


def empty(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.empty(*size)`` as a global tensor, whose values are not initialized.

    They are arbitrary, and those of a replicated (B) tensor may differ between ranks. ``options``
    are the keyword arguments of torch's function, such as ``dtype``.
    """
    return _make_filled(torch.empty, size, placement, sbp, options, lambda x, spec: None)


def full(
    size: Any,
    fill_value: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    **options: Any,
) -> Any:
    """Return ``torch.full(size, fill_value)`` as a global tensor.

    ``full((4, 3), 0.5, placement=p, sbp=S(0))``. ``options`` are the keyword arguments of torch's
    function, such as ``dtype``.
    """
    value = fill_value.item() if isinstance(fill_value, torch.Tensor) else fill_value
    return _make_filled(
        torch.full,
        (size, value),
        placement,
        sbp,
        options,
        _fill_first_addend(lambda x, spec: x.fill_(value)),
    )


def eye(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.eye(*size)``, an identity matrix, as a global tensor.

    ``eye(4, placement=p, sbp=S(0))``. ``options`` are the keyword arguments of torch's function.
    """
    return _make_filled(
        torch.eye, size, placement, sbp, options, _fill_first_addend(_fill_diagonal)
    )


def arange(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.arange(*args)`` as a global tensor: ``arange(8, placement=p, sbp=S(0))``.

    ``options`` are the keyword arguments of torch's function, such as ``dtype``.
    """
    return _make_from_whole(torch.arange, args, placement, sbp, options)


def linspace(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.linspace(*args)`` as a global tensor.

    ``linspace(0, 1, 5, placement=p, sbp=S(0))``. ``options`` are the keyword arguments of torch's
    function, such as ``dtype``.
    """
    return _make_from_whole(torch.linspace, args, placement, sbp, options)


def logspace(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return ``torch.logspace(*args)`` as a global tensor.

    ``logspace(0, 2, 5, placement=p, sbp=S(0))``. ``options`` are the keyword arguments of torch's
    function, such as ``dtype``.
    """
    return _make_from_whole(torch.logspace, args, placement, sbp, options)


def rand(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return a global tensor of random numbers that are uniform in [0, 1), as ``torch.rand`` does.

    The numbers do not depend on ``placement`` and ``sbp``. ``options`` are the keyword arguments of
    torch's function, such as ``generator``.
    """
    key = _key_drawer("rand", options)

    def fill(x: torch.Tensor, spec: TensorSpec) -> None:
        fill_uniform(x, spec, key(spec.placement))

    return _make_filled(torch.rand, size, placement, sbp, options, fill)


def randn(
    *size: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return a global tensor of standard normal random numbers, as ``torch.randn`` does.

    The numbers do not depend on ``placement`` and ``sbp``. ``options`` are the keyword arguments of
    torch's function, such as ``generator``.
    """
    key = _key_drawer("randn", options)

    def fill(x: torch.Tensor, spec: TensorSpec) -> None:
        fill_normal(x, spec, key(spec.placement))

    return _make_filled(torch.randn, size, placement, sbp, options, fill)


def normal(
    mean: float,
    std: float,
    size: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    **options: Any,
) -> Any:
    """Return a global tensor of normal random numbers, as ``torch.normal(mean, std, size)`` does.

    The numbers do not depend on ``placement`` and ``sbp``. ``options`` are the keyword arguments of
    torch's function, such as ``generator``.
    """
    key = _key_drawer("normal", options)
    return _make_filled(
        torch.normal,
        (mean, std, size),
        placement,
        sbp,
        options,
        lambda x, spec: fill_normal(x, spec, key(spec.placement), mean, std),
    )


def randint(
    *args: Any, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return a global tensor of random integers, as ``torch.randint([low=0,] high, size)`` does.

    The numbers do not depend on ``placement`` and ``sbp``. ``options`` are the keyword arguments of
    torch's function, such as ``generator``.
    """
    key = _key_drawer("randint", options)

    def fill(x: torch.Tensor, spec: TensorSpec) -> None:
        bounds = [a for a in args if not isinstance(a, tuple | list)]
        bounds += [options[name] for name in ("low", "high") if name in options]
        low, high = bounds if len(bounds) == 2 else (0, *bounds)
        fill_integers(x, spec, key(spec.placement), low, high)

    return _make_filled(torch.randint, args, placement, sbp, options, fill)


def randperm(
    n: int, *, placement: Placement | None = None, sbp: SbpLike | None = None, **options: Any
) -> Any:
    """Return a random permutation of 0 to n - 1 as a global tensor, as ``torch.randperm`` does.

    It does not depend on ``placement`` and ``sbp``. ``options`` are the keyword arguments of
    torch's function, such as ``generator``.
    """
    key = _key_drawer("randperm", options)
    placement, sbp = resolved_placement("randperm", placement, sbp)

    def make(n: int, *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        drawn_key = key(placement)
        if device.type == "meta":
            return torch.empty(n, dtype=dtype, device=device)
        return permutation(n, drawn_key, device).to(dtype)

    return _make_from_whole(torch.randperm, (n,), placement, sbp, options, make)


def tensor(
    data: Any,
    *,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    check: bool = False,
) -> Any:
    """Return ``torch.tensor(data)`` as a global tensor, from data that is the same on every rank.

    ``tensor([1.0, 2.0], placement=p, sbp=S(0))``. With ``check`` the data is compared between
    ranks.
    """
    placement, sbp = resolved_placement("tensor", placement, sbp)
    x = distribute(torch.tensor(data, dtype=dtype), placement, sbp, check=check)
    return x.requires_grad_() if requires_grad else x


# -- how -------------------------------------------------------------------------------------------


@counts_out_of_memory
def _make_filled(
    like: Callable[..., torch.Tensor],
    args: tuple,
    placement: Placement | None,
    sbp: SbpLike | None,
    options: dict,
    fill: Fill,
) -> Any:
    """Return a tensor of which each rank allocates its shard and fills it by ``fill``.

    Args:
        like: the factory of torch that makes such a plain tensor; a call on ``meta`` gives the
            shape and dtype.
        args: its positional arguments.
        placement, sbp: as passed by the user.
        options: its keyword arguments.
        fill: called with (shard, spec) to write this rank's values.
    """
    spec, requires_grad = _spec_of_factory_call(like, args, placement, sbp, options)
    local = torch.empty(
        spec.local_shape(my_coordinate(spec.placement)),
        dtype=spec.dtype,
        device=_local_device(spec.placement),
    )
    # Also on ranks outside, with a meta tensor, so that random factories draw a key on every rank.
    fill(local, spec)
    x = attach(local, spec)
    return x.requires_grad_() if requires_grad else x


@counts_out_of_memory
def _make_from_whole(
    like: Callable[..., torch.Tensor],
    args: tuple,
    placement: Placement | None,
    sbp: SbpLike | None,
    options: dict,
    make: Callable[..., torch.Tensor] | None = None,
) -> Any:
    """Return a 1-d tensor that each rank makes whole and takes its shard from.

    It is for factories such as ``arange``, of which a shard cannot be made alone: the k-th value
    depends on where torch's loops start.

    Args:
        like: the factory of torch, which gives shape and dtype.
        args: its positional arguments.
        placement, sbp: as passed by the user.
        options: its keyword arguments.
        make: function that makes the values, if not ``like``.
    """
    spec, requires_grad = _spec_of_factory_call(like, args, placement, sbp, options)
    extra = {k: v for k, v in options.items() if k not in _OPTIONS}
    whole = (make or like)(*args, **extra, dtype=spec.dtype, device=_local_device(spec.placement))
    x = attach(shard_of_plain(whole, spec), spec)
    return x.requires_grad_() if requires_grad else x


_OPTIONS = ("dtype", "requires_grad", "generator")


def _spec_of_factory_call(
    like: Callable[..., torch.Tensor],
    args: tuple,
    placement: Placement | None,
    sbp: SbpLike | None,
    options: dict,
) -> tuple[TensorSpec, bool]:
    """Return (spec, requires_grad) of the tensor that a call of the factory ``like`` makes.

    Raises:
        TypeError: ``device`` is given, which the placement decides, or the placement is missing.
    """
    what = like.__name__
    placement, sbp = resolved_placement(what, placement, sbp)
    if "device" in options:
        raise TypeError(
            f"{what}: device={options['device']!r} was given, and the placement says where the "
            f"pieces lie: {placement}. "
            "Leave device= out."
        )
    check_world(what, placement)
    extra = {k: v for k, v in options.items() if k not in ("requires_grad", "generator")}
    meta = like(*args, **extra, device="meta")
    spec = TensorSpec.of(placement, sbp, meta.shape, meta.dtype)
    check_partial(what, spec)
    return spec, bool(options.get("requires_grad", False))


def _local_device(placement: Placement) -> torch.device:
    return torch.device("meta") if my_coordinate(placement) is None else device_of(placement)


def _key_drawer(what: str, options: dict) -> Callable[[Placement], Any]:
    """Return a function that draws the key (seed and counter) of a random op on a placement.

    The factory calls it only after the arguments were checked, so that a failing call draws no key.
    """
    return lambda placement: key_from(options.get("generator"), what, placement)


def _fill_first_addend(fill: Fill) -> Fill:
    """Wrap ``fill`` so that it is correct for P tensors, whose value is the sum over ranks.

    The first rank of each P axis fills its shard, and the others write zeros.
    """

    def run(x: torch.Tensor, spec: TensorSpec) -> None:
        coordinate = my_coordinate(spec.placement)
        if coordinate is not None and any(
            e is P and c for e, c in zip(spec.sbp, coordinate, strict=True)
        ):
            x.zero_()
        else:
            fill(x, spec)

    return run


def _fill_diagonal(x: torch.Tensor, spec: TensorSpec) -> None:
    """Write this rank's shard of an identity matrix into ``x``."""
    coordinate = my_coordinate(spec.placement)
    if spec.layout.is_cut:
        if not x.is_meta:
            rows, columns = map(indices_of_runs, spec.runs(coordinate))
            x.copy_(rows.unsqueeze(1) == columns)
        return
    (top, left), (rows, columns) = spec.region(coordinate)
    x.zero_()
    first, end = max(top, left), min(top + rows, left + columns)
    if first < end and not x.is_meta:
        x[first - top : end - top, first - left : end - left].fill_diagonal_(1)
