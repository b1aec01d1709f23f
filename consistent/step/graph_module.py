"""Settings of one module inside a graph: its stage, and whether activations are recomputed."""

from __future__ import annotations

import torch

from ..nn.recompute import is_recomputed, recompute
from ..pipeline.stage import Stage, set_stage, stage_of
from ..spec import Placement
from ..torch_patches.views_of_modules import views


class GraphModule:
    """Handle for the graph settings of a module: its stage, and whether activations are recomputed.

    ``module.to(nn.graph.GraphModule)`` returns it. ``module`` itself is unchanged.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def set_stage(
        self, stage_id: int | None = None, placement: Placement | None = None
    ) -> GraphModule:
        """Assign the module to pipeline stage ``stage_id``, which runs on ``placement``.

        Raises:
            ValueError: one of the two arguments is missing, or ``stage_id`` is negative.
            RuntimeError: the placement names ranks that the world does not have.
        """
        if stage_id is None or placement is None:
            raise ValueError(
                f"set_stage: stage_id is {stage_id!r} and placement is {placement!r}. Give both: "
                "set_stage(stage_id=0, placement=consistent.placement(...))."
            )
        set_stage(self.module, stage_id, placement)
        return self

    @property
    def stage(self) -> Stage | None:
        """Pipeline stage of the module, or None if none was set."""
        return stage_of(self.module)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether backward computes the module's activations again instead of storing them."""
        return is_recomputed(self.module)

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        recompute(self.module, value)


views.add(GraphModule)
