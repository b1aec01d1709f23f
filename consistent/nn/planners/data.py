"""Data parallelism: every rank has the whole module; gradients are summed over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import B
from ..plan import Layouts, Plan
from .asked import PlanRequest


@dataclass(frozen=True)
class data_parallel:  # noqa: N801  (a plan, as zero3 is)
    """Plan ``"data"`` with a codec for gradients, which are summed in fewer bytes.

    Every rank has the whole module.

    ```
    consistent.parallelize(model, placement, consistent.data_parallel(reduce="powersgd:4"))
    consistent.parallelize(model, grid, {"dp": consistent.data_parallel("int8"), "tp": "tensor"})
    ```

    Args:
        reduce: the codec: ``"bf16"``, 2 bytes for each number; ``"int8"`` or ``"fp8"``, one byte
            for each number and a float32 for each 256; ``"powersgd:4"``, matrices as products of
            rank 4 (or another rank), and vectors unchanged; ``"powersgd:16:int8"``, the same with
            factors that are sent by a codec, here four times the rank in the same bytes; or None
            for no codec. The rounding error is kept on each rank, in a buffer of as many numbers as
            the parameter, and added to the next gradient. Each rank sums a share of a gradient and
            sends the sum with the same codec, so all ranks get the same bits.
    """

    reduce: str | None = None

    def __call__(self, request: PlanRequest) -> Plan:
        if self.reduce is None:
            return Plan()
        layouts = Layouts((B,), reduce=(self.reduce,))
        return Plan(
            {
                name: layouts
                for name, tensor in request.tensors.items()
                if request.is_parameter(name) and tensor.is_floating_point()
            }
        )


def plan_data(request: PlanRequest) -> Plan:
    """Return the plan ``"data"``, which is empty: all tensors are B (replicated)."""
    return data_parallel()(request)
