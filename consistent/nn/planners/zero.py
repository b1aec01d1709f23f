"""ZeRO plans (zero1, zero2, zero3): split tensors that ranks would otherwise hold redundantly.

```
         parameter     .grad          optimizer and its state
zero1    B             B              S
zero2    B             S              S
zero3    S, used as B  S              S
```

The first dim is split, because its shards are contiguous in memory, or the longest dim if the first
is shorter than the number of ranks. Dims that another axis splits are not considered.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import B, Sbp, Split
from ..plan import Layouts, Plan
from .asked import PlanRequest


@dataclass(frozen=True)
class zero1:  # noqa: N801  (a plan, written as the name of it is)
    """Plan ``"zero1"`` with a codec, so that gradients are summed in fewer bytes.

    The optimizer's state is split over the ranks; parameters and gradients are replicated.

    ```
    consistent.parallelize(model, placement, consistent.zero1(reduce="int8"))
    ```

    Args:
        reduce: the codec for summing gradients, as in ``data_parallel``. The updated shards are
            gathered without a codec.
    """

    reduce: str | None = None

    def __call__(self, request: PlanRequest) -> Plan:
        return _plan_with_splits(request, lambda s: Layouts((B,), step=(s,), reduce=(self.reduce,)))


def plan_zero1(request: PlanRequest) -> Plan:
    """Return the plan ``"zero1"``, in which only the optimizer's state is split."""
    return zero1()(request)


def plan_zero2(request: PlanRequest) -> Plan:
    """Return the plan ``"zero2"``, in which gradients and the optimizer's state are split."""
    return _plan_with_splits(request, lambda s: Layouts((B,), grad=(s,), step=(s,)))


@dataclass(frozen=True)
class zero3:  # noqa: N801  (a plan, written as the name of it is)
    """Plan ``"zero3"`` with codecs, by which fewer bytes are sent.

    Parameters, gradients and the optimizer's state are split; parameters are gathered for use.

    ```
    consistent.parallelize(model, placement, consistent.zero3(gather="int8", reduce="int8"))
    consistent.parallelize(model, grid, {"dp": "data", "fsdp": consistent.zero3(reduce="bf16")})
    ```

    Args:
        gather: the codec for gathering parameters: ``"bf16"``, 2 bytes for each number; ``"int8"``
            or ``"fp8"``, one byte for each number and a float32 for each 256; or None for no codec.
            All ranks compute with the same rounded values; the optimizer steps the exact ones.
        reduce: the codec for summing gradients: one of these names; ``"powersgd:4"``, matrices as
            products of rank 4 (or another rank), and vectors unchanged; or ``"powersgd:16:int8"``,
            the same with factors that are sent by a codec. The rounding error is kept on each rank,
            in a buffer of as many numbers as the gathered parameter, and added to the next
            gradient.
    """

    gather: str | None = None
    reduce: str | None = None

    def __call__(self, request: PlanRequest) -> Plan:
        return _plan_with_splits(
            request,
            lambda s: Layouts((s,), use=(B,), gather=(self.gather,), reduce=(self.reduce,)),
        )


def plan_zero3(request: PlanRequest) -> Plan:
    """Return the plan ``"zero3"``: parameters, gradients and optimizer state are split.

    Parameters are gathered for use.
    """
    return zero3()(request)


def _plan_with_splits(request: PlanRequest, layouts: object) -> Plan:
    """Return the plan that gives each parameter ``layouts(s)``, where ``_choose_split`` gives s.

    Parameters that cannot be split are left out, and so are replicated.
    """
    tensors: dict[str, Layouts] = {}
    for name, tensor in request.tensors.items():
        split = _choose_split(tuple(tensor.shape), request.ranks, request.split_by_others(name))
        if request.is_parameter(name) and split is not None:
            tensors[name] = layouts(split)  # type: ignore[operator]
    return Plan(tensors)


def _choose_split(shape: tuple[int, ...], ranks: int, used_dims: set[int]) -> Sbp | None:
    """Return the S by which a tensor is split: along its first free dim, or the longest one.

    None if no dim can be split.

    Args:
        shape: its shape.
        ranks: the number of ranks; the first free dim is taken if it is at least as long.
        used_dims: the dims that other axes split.
    """
    free = [dim for dim in range(len(shape)) if dim not in used_dims]
    if not free or max(shape[dim] for dim in free) < 2:
        return None
    if shape[free[0]] >= ranks:
        return Split(free[0])
    return Split(max(free, key=lambda dim: shape[dim]))
