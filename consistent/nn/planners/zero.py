"""zero1, zero2, zero3: what every rank would have twice is split over the ranks.

```
         parameter     .grad          optimizer and its state
zero1    B             B              S
zero2    B             S              S
zero3    S, used as B  S              S
```

Which dim is split: the first, for its pieces are one run of memory; the longest, where the first
has fewer items than there are ranks. A dim that another axis splits is left to that axis.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import B, Sbp, Split
from ..plan import Layouts, Plan
from .asked import Asked


@dataclass(frozen=True)
class zero1:  # noqa: N801  (a plan, written as the name of it is)
    """The plan ``"zero1"``, by which the optimizer's state is split, with a codec by which
    gradients are summed in fewer bytes.

    ```
    consistent.parallelize(model, placement, consistent.zero1(reduce="int8"))
    ```

    Args:
        reduce: by what gradients are summed, as in ``data_parallel``. The updated shares are
            gathered as they are.
    """

    reduce: str | None = None

    def __call__(self, asked: Asked) -> Plan:
        return _plan(asked, lambda s: Layouts((B,), step=(s,), reduce=(self.reduce,)))


def plan_zero1(asked: Asked) -> Plan:
    """The optimizer's state is split."""
    return zero1()(asked)


def plan_zero2(asked: Asked) -> Plan:
    """Gradients and the optimizer's state are split."""
    return _plan(asked, lambda s: Layouts((B,), grad=(s,), step=(s,)))


@dataclass(frozen=True)
class zero3:  # noqa: N801  (a plan, written as the name of it is)
    """The plan ``"zero3"``, by which parameters are split and gathered for use; so are gradients
    and the optimizer's state. With codecs what is sent has fewer bytes.

    ```
    consistent.parallelize(model, placement, consistent.zero3(gather="int8", reduce="int8"))
    consistent.parallelize(model, grid, {"dp": "data", "fsdp": consistent.zero3(reduce="bf16")})
    ```

    Args:
        gather: by what parameters are gathered: ``"bf16"``, 2 bytes a number; ``"int8"`` or
            ``"fp8"``, a byte and a float32 for each 256; or None, as they are. Ranks compute with
            the rounded values, the same on all of them; the optimizer steps the exact ones.
        reduce: by what gradients are summed: one of these names, or ``"powersgd:4"``, matrices as
            products of rank 4, or another, and vectors as they are. What is left out is kept on
            each rank, as large as the gathered parameter, and added to the next gradient.
    """

    gather: str | None = None
    reduce: str | None = None

    def __call__(self, asked: Asked) -> Plan:
        return _plan(
            asked,
            lambda s: Layouts((s,), use=(B,), gather=(self.gather,), reduce=(self.reduce,)),
        )


def plan_zero3(asked: Asked) -> Plan:
    """Parameters are split and gathered for use; so are gradients and the optimizer's state."""
    return zero3()(asked)


def _plan(asked: Asked, layouts: object) -> Plan:
    tensors: dict[str, Layouts] = {}
    for name, tensor in asked.tensors.items():
        split = _split(tuple(tensor.shape), asked.ranks, asked.split_by_others(name))
        if asked.is_parameter(name) and split is not None:
            tensors[name] = layouts(split)  # type: ignore[operator]
    return Plan(tensors)


def _split(shape: tuple[int, ...], ranks: int, taken: set[int]) -> Sbp | None:
    free = [dim for dim in range(len(shape)) if dim not in taken]
    if not free or max(shape[dim] for dim in free) < 2:
        return None
    if shape[free[0]] >= ranks:
        return Split(free[0])
    return Split(max(free, key=lambda dim: shape[dim]))
