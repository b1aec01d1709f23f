"""A module as a part of a graph: which stage it is in, and whether it stores what it computes."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from ..pipeline.stage import Stage, set_stage, stage_of
from ..spec import Placement
from ..torch_patches.views_of_modules import views

_RECOMPUTED = "_consistent_recomputed"


class GraphModule:
    """What ``module.to(nn.graph.GraphModule)`` gives; ``module`` itself stays as it is."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module = module

    def set_stage(
        self, stage_id: int | None = None, placement: Placement | None = None
    ) -> GraphModule:
        """Let the module run in stage ``stage_id``, on ``placement``.

        Raises:
            ValueError: one of both is missing, or the number is negative.
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
        """What ``set_stage`` said."""
        return stage_of(self.module)

    @property
    def activation_checkpointing(self) -> bool:
        """Whether backward computes the module's activations again, instead of keeping them."""
        return self.module.__dict__.get(_RECOMPUTED, False)

    @activation_checkpointing.setter
    def activation_checkpointing(self, value: bool) -> None:
        self.module.__dict__[_RECOMPUTED] = bool(value)


views.add(GraphModule)


@contextmanager
def recomputing(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Inside, those of ``modules`` that are to be recomputed run under torch's checkpoint."""
    asked = [m for m in modules if m.__dict__.get(_RECOMPUTED)]
    before = [m.__dict__.get("_compiled_call_impl") for m in asked]
    for module in asked:
        module.__dict__["_compiled_call_impl"] = functools.partial(_recomputed, module)
    try:
        yield
    finally:
        for module, call in zip(asked, before, strict=True):
            if call is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = call


def _recomputed(module: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return module._call_impl(*args, **kwargs)
    return checkpoint(module._call_impl, *args, use_reentrant=False, **kwargs)
