"""The step of a graph with stages, in several micro-batches at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..pipeline.engine import Engine
from ..pipeline.show import show
from ..pipeline.stage import Stage


class Pipelined:
    """Runs ``build`` of a graph in the order of a schedule."""

    def __init__(self, graph: Any, stages: list[Stage], config: Any) -> None:
        self._graph = graph
        self._asked = [*stages], config.schedule
        self._engine = Engine(
            type(graph).__name__,
            [stage.placement for stage in stages],
            [() for _ in stages],
            lambda: list(graph.modules()),
            config.schedule,
            moves=False,
        )

    def fits(self, stages: list[Stage], config: Any) -> bool:
        """Whether stages and schedule are those that this was made for."""
        return self._asked == ([*stages], config.schedule)

    def show(self, path: str | Path | None) -> str:
        """The schedule, and the program of a micro-batch by stages; see ``Pipeline.show``."""
        return show(self._engine, self._graph.config.micro_batches, path)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``build`` returns for a batch, backward included where it calls it.

        Raises:
            RuntimeError: there is an optimizer, and backward is called on no loss.
        """
        graph = self._graph
        if not (graph.trains or torch.is_grad_enabled()):
            return self._engine.run(graph.build, args, kwargs, graph.config.micro_batches, None)
        # Losses are scaled by the ranks of their stages, and a scaler is ready once it has scaled:
        # the other ranks step with it, too.
        graph._scale(torch.zeros((), device=graph._device_type()))
        return self._engine.run(
            graph.build,
            args,
            kwargs,
            graph.config.micro_batches,
            graph._scale,
            needs_loss=graph.trains,
        )
