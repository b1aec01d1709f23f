"""Detection of which dims a view keeps, from the strides that torch gives the view.

A probe of the op's logical shape on ``meta`` has a different odd prime as the stride of each dim. A
view that keeps a dim keeps its stride and size; a step, a diagonal, a new dim gives a multiple, a
sum, a product, and none of these is another of the primes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from ...spec import P, S
from ..signature import Call, DoesNotFit, Operand, Signature

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73)

Positions = tuple[int, ...]


def kept_dim_positions(
    view: Callable[[torch.Tensor], Any], shape: Iterable[int]
) -> dict[int, Positions]:
    """Return {dim of ``shape``: its position in each output of ``view``} for the dims kept in all.

    A dim is kept if it has the same size and stride in the output. ``lambda x: x.t()`` and (4, 3)
    give ``{0: (1,), 1: (0,)}``. ``view`` is run on a tensor on ``meta``.
    """
    size = tuple(shape)
    result = view(torch.empty_strided(size, _PRIMES[: len(size)], device="meta"))
    outs = result if isinstance(result, tuple | list) else (result,)
    positions = {
        d: tuple(_dim_with_stride(out, _PRIMES[d], n) for out in outs) for d, n in enumerate(size)
    }
    return {d: dims for d, dims in positions.items() if None not in dims}  # type: ignore[misc]


def _dim_with_stride(out: torch.Tensor, stride: int, n: int) -> int | None:
    """Return the dim of ``out`` that has this stride and size ``n``; None if there is none."""
    strides = out.stride()
    if strides.count(stride) != 1:
        return None
    d = strides.index(stride)
    return d if out.shape[d] == n else None


def moved_split_signatures(call: Call, acted: Iterable[int] = ()) -> list[Signature]:
    """Return the SBP signatures in which a split moves with its dim, for dims that a view keeps.

    ``S(0) -> S(1)`` of a transpose. Dims in ``acted`` are left out.
    """
    (x,) = call.require_operands(1)
    positions = kept_dim_positions(lambda probe: run_on(call, probe), x.shape)
    return [
        call.new_signature({0: S(d)}, [S(place) for place in dims])
        for d, dims in positions.items()
        if d not in acted
    ]


def view_signatures(call: Call, parts: int) -> list[Signature]:
    """Return the SBP signatures of a view whose arguments ignore the sizes of the dims it keeps.

    A split moves with its dim, and P passes: ``S(0) -> S(1)`` and ``P -> P`` of a transpose.
    """
    return [
        call.broadcast_signature(),
        call.new_signature({0: P}, P),
        *moved_split_signatures(call),
    ]


def run_on(call: Call, x: torch.Tensor) -> Any:
    """Return the result of the op of ``call``, which has one operand, for ``x`` in its place.

    Raises:
        DoesNotFit: torch has no function of the op's name.
    """
    args = [x, *(a for a in call.args if not isinstance(a, Operand))]
    kwargs = {k: v for k, v in call.kwargs.items() if not isinstance(v, Operand)}
    for owner in (torch.Tensor, torch, torch.ops.aten):
        if hasattr(owner, call.name):
            return getattr(owner, call.name)(*args, **kwargs)
    raise DoesNotFit(f"{call.name} is not a function of torch")
