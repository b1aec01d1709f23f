"""Runner of a strategy without pipeline stages and micro-batches: the model runs as it is written,
on one placement.

Nothing is recorded, so the model may read values of tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from ...dispatch.plans.shards import attach, is_global
from ...movement.world import device_of, my_coordinate
from ...nn.parallelize import parallelize
from ...nn.plan import Plan
from ...nn.recompute import is_recomputed, recomputing
from ...pipeline.micro_batches import rows_of
from ...pipeline.pipeline import loss_of, mark_recomputed
from ...pipeline.share import batch_axes
from ...spec import B, Placement, S, TensorSpec
from ...spec.nested import arguments_of, map_tensors


class OneStage:
    """A parallelized model with the interface of a ``Pipeline``; ``model`` is the module itself.

    ``Strategy.apply`` returns it for a strategy without stages and micro-batches.

    Args:
        placement: placement on which the model runs.
        plan: plan of the whole model.
        loss: loss function, as passed to ``consistent.nn.pipeline``.
        checkpoint: names of the modules whose forward is recomputed in backward.
    """

    micro_batches = 1

    def __init__(
        self,
        model: nn.Module,
        placement: Placement,
        plan: Plan,
        loss: Callable[[Any, Any], Any] | None,
        checkpoint: Sequence[str],
    ) -> None:
        mark_recomputed(model, checkpoint)
        self.model = parallelize(model, placement, plan, verbose=False)
        self._placement, self._loss = placement, loss
        self._batch_axes = batch_axes(model, placement)
        self._recomputed = [m for m in model.modules() if is_recomputed(m)]

    def step(self, batch: Any, target: Any = None, *, outputs: bool = False) -> Any:
        """Run forward and backward of a batch, as ``Pipeline.step`` does, and return the loss.

        With ``outputs``, return (loss, result of the model).
        """
        args, kwargs = arguments_of(batch)
        args, kwargs, target = self._global_inputs((args, kwargs, target))
        with recomputing(self._recomputed):
            out = self.model(*args, **kwargs)
            loss = loss_of(self.model, self._loss, out, target)
            loss.backward()
        return (loss.detach(), out) if outputs else loss.detach()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's result for a batch, without gradients."""
        args, kwargs = self._global_inputs((args, kwargs))
        with torch.no_grad():
            return self.model(*args, **kwargs)

    def _global_inputs(self, inputs: Any) -> Any:
        """Return ``inputs`` with a global tensor for each tensor of the batch.

        Every rank passes the whole batch. A tensor with its number of rows becomes S(0) along the
        axes that split the batch, and each rank keeps its own rows. Other tensors become B.
        """
        rows = rows_of(type(self.model).__name__, inputs)
        return map_tensors(inputs, lambda x: self._global_input(x, rows))

    def _global_input(self, x: Any, rows: int) -> Any:
        if is_global(x):
            return x
        axes = self._batch_axes if x.ndim and x.shape[0] == rows else ()
        sbp = tuple(S(0) if k in axes else B for k in range(self._placement.ndim))
        spec = TensorSpec.of(self._placement, sbp, x.shape, x.dtype)
        if axes:
            # Every rank has the whole batch, so cutting it needs no communication.
            starts, sizes = spec.region(my_coordinate(self._placement))
            x = x.narrow(0, starts[0], sizes[0])
        return attach(x.to(device_of(self._placement)), spec)
