"""data: every rank has all of the module; gradients are summed over the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from ...spec import B
from ..plan import Layouts, Plan
from .asked import Asked


@dataclass(frozen=True)
class data_parallel:  # noqa: N801  (a plan, as zero3 is)
    """The plan ``"data"``, by which every rank has the whole module, with a codec by which
    gradients are summed in fewer bytes.

    ```
    consistent.parallelize(model, placement, consistent.data_parallel(reduce="powersgd:4"))
    consistent.parallelize(model, grid, {"dp": consistent.data_parallel("int8"), "tp": "tensor"})
    ```

    Args:
        reduce: ``"bf16"``, 2 bytes a number; ``"int8"`` or ``"fp8"``, a byte and a float32 for each
            256; ``"powersgd:4"``, matrices as products of rank 4, or another, and vectors as they
            are; or None, as they are. What is left out is kept on each rank, as large as the
            parameter, and added to the next gradient. Each rank adds up a share of a gradient and
            sends it on by the same codec, so that all ranks get the same bits.
    """

    reduce: str | None = None

    def __call__(self, asked: Asked) -> Plan:
        if self.reduce is None:
            return Plan()
        layouts = Layouts((B,), reduce=(self.reduce,))
        return Plan(
            {
                name: layouts
                for name, tensor in asked.tensors.items()
                if asked.is_parameter(name) and tensor.is_floating_point()
            }
        )


def plan_data(asked: Asked) -> Plan:
    """All B, which is what a plan that says nothing means."""
    return data_parallel()(asked)
