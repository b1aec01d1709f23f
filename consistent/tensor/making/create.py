"""The two ways to make a global tensor from plain ones.

``from_local`` takes the tensor of each rank as that rank's shard. ``distribute`` takes a tensor
that every rank has whole, and shards it. Factories such as ``zeros`` are in ``factories.py``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from mirrored.transports.default import current

from ...dispatch.plans.shards import attach, check_partial, is_global, refuse_other_views
from ...movement import check_mode as checking
from ...movement.differentiable import shard_of_plain
from ...movement.sparse_parts import meta_like
from ...movement.world import device_of, my_coordinate
from ...spec import (
    Coordinate,
    NdSbp,
    Placement,
    SbpLike,
    Split,
    TensorSpec,
    as_nd_sbp,
    check_placement,
    resolve_dims,
)
from .agreed_shards import agreed_spec, check_equal_along, wrong_shard_error
from .scope import resolved_placement


def from_local(
    shard: torch.Tensor,
    placement: Placement,
    sbp: SbpLike,
    *,
    shape: Sequence[int] | None = None,
    check: bool = False,
) -> Any:
    """Return the global tensor whose shard on each rank is ``shard``.

    ``sbp`` says for each axis of the placement what the ranks' shards are: for ``S(d)`` balanced
    pieces along dim d, in rank order; for ``B`` the whole tensor; for ``P`` addends of it. For
    ``P(max)`` and ``P(min)`` the value is the elementwise maximum or minimum of the shards. The
    result shares the shard's storage. Differentiable: the gradient of ``shard`` is this rank's
    shard of the global gradient, in the dual SBP (S for S, P for B, B for P).

    Args:
        shard: this rank's shard. On a rank outside the placement only its dtype is read.
        placement: the ranks that have a shard.
        sbp: the layout on each axis of the placement.
        shape: the logical shape. Without it the ranks exchange the shapes of their shards, in one
            small collective of all ranks of the world, unless every SBP is B or partial and the
            placement is the whole world.
        check: compare shapes, dtypes and SBPs between ranks, and for B axes the values. Always done
            in check mode.

    Raises:
        ValueError: a shard is not what the SBP requires (the message names the rank), or is on
            another device type. If nothing is sent, only the ranks with a wrong shard raise.
    """
    _check_plain(shard, "from_local", "shard")
    check_world("from_local", placement)
    check = check or checking.enabled
    coordinate = my_coordinate(placement)
    entries = _resolved_sbp(
        "from_local", sbp, placement, shard.ndim if shape is None else len(shape), coordinate
    )
    if coordinate is not None:
        _check_device("from_local", shard, placement)
    # The logical shape depends on other ranks if a dim is split, or if some ranks are outside.
    exchanges_shapes = check or (
        shape is None
        and (any(isinstance(e, Split) for e in entries) or placement.size != current().size)
    )
    spec = agreed_spec(shard, placement, entries, shape, check) if exchanges_shapes else None
    if spec is None:
        size = shard.shape if shape is None else shape
        spec = TensorSpec.of(placement, entries, size, shard.dtype)
        if coordinate is not None and tuple(shard.shape) != spec.local_shape(coordinate):
            raise wrong_shard_error(spec, coordinate, current().rank, tuple(shard.shape))
    check_partial("from_local", spec)
    if coordinate is None:
        return attach(meta_like(shard, spec.local_shape(None), spec.dtype), spec)
    # An alias, because `attach` changes the class of its argument, and `shard` is the caller's.
    keeps_history = shard.requires_grad and torch.is_grad_enabled()
    return attach(shard.view_as(shard) if keeps_history else shard.detach(), spec)


def distribute(
    tensor: torch.Tensor,
    placement: Placement | None = None,
    sbp: SbpLike | None = None,
    *,
    check: bool = False,
) -> Any:
    """Return a global tensor made from a plain tensor that every rank has whole.

    Each rank copies its shard, so the result has its own storage, and nothing is sent.
    Differentiable: on every rank of the placement ``tensor`` gets the whole gradient.

    Args:
        tensor: the whole value, on any device. On ranks outside the placement only its shape and
            dtype are read.
        placement: ranks to distribute to; without it those of the ``placement_scope``.
        sbp: the layout on each axis of the placement, S (sharded), B (replicated) or P (partial
            sum); inside a ``placement_scope`` it may be left out and is B.
        check: compare the values of the ranks, by a hash. Always done in check mode.

    Raises:
        ValueError: with ``check``, the values differ.
    """
    _check_plain(tensor, "distribute", "tensor")
    placement, sbp = resolved_placement("distribute", placement, sbp)
    check_world("distribute", placement)
    spec = TensorSpec.of(placement, sbp, tensor.shape, tensor.dtype)
    check_partial("distribute", spec)
    if (check or checking.enabled) and my_coordinate(placement) is not None:
        check_equal_along("distribute", tensor, placement, tuple(range(placement.ndim)))
    if my_coordinate(placement) is not None and tensor.device.type != placement.type:
        tensor = tensor.to(device_of(placement))
    checking.set_current_op("distribute")
    return attach(shard_of_plain(tensor, spec), spec)


def _check_plain(x: Any, what: str, name: str) -> None:
    if not isinstance(x, torch.Tensor):
        raise TypeError(
            f"{what}: {name} is of type {type(x).__name__}, and not a tensor. Write "
            f"{what}(torch.as_tensor({name}), placement, sbp)."
        )
    refuse_other_views(x, what)
    if is_global(x):
        raise TypeError(
            f"{what}: {name} is a global tensor already, {x._spec}. "  # type: ignore[attr-defined]
            f"Use {name}.to_global(sbp=...), or give {name}.to_local()."
        )


# -- checks that all ways to make a global tensor share --------------------------------------------


def check_world(what: str, placement: Placement) -> None:
    """Raise if ``placement`` is not a placement, or needs ranks that the world does not have.

    All functions that make or move global tensors call it. ``what`` is the function's name, for the
    error.
    """
    check_placement(what, placement)
    size = current().size
    if placement.size > size or (size == 1 and placement.first_rank != 0):
        raise RuntimeError(
            f"{what}: {placement} is of {_ranks_text(placement.size)}, and the world has "
            f"{_ranks_text(size)}: the program was started by python and not by torchrun, or with "
            "fewer processes, or torch.distributed is not initialised.\n"
            f"  Start it with torchrun --standalone --nproc_per_node {placement.ranks.max() + 1} "
            "PROGRAM: the first global tensor then joins the ranks."
        )


def _ranks_text(ranks: int) -> str:
    return f"{ranks} rank" if ranks == 1 else f"{ranks} ranks"


def _check_device(what: str, shard: torch.Tensor, placement: Placement) -> None:
    if shard.device.type != placement.type:
        raise ValueError(
            f"{what}: shard is on {shard.device}, and {placement} keeps its pieces on "
            f"{placement.type}. "
            f'Move it first: shard.to("{placement.type}").'
        )


def _resolved_sbp(
    what: str, sbp: SbpLike, placement: Placement, ndim: int, coordinate: Coordinate | None
) -> NdSbp:
    """Return ``sbp`` as a tuple with one SBP per axis, with negative dims resolved.

    A rank outside the placement (``coordinate`` None) does not know the number of dims, and leaves
    them as they are.
    """
    if coordinate is None:
        return as_nd_sbp(sbp)
    return resolve_dims(sbp, placement, (0,) * ndim)
