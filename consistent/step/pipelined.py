"""Execution of a graph with pipeline stages, which work on several micro-batches at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..pipeline.engine import Engine
from ..pipeline.show import show
from ..pipeline.stage import Stage


class Pipelined:
    """Runner of a graph's ``build`` on its pipeline stages, in the order of a schedule.

    The graph makes one in its first call with several stages and micro-batches, and uses it again
    in later calls as long as ``fits``.
    """

    def __init__(self, graph: Any, stages: list[Stage], config: Any) -> None:
        self._graph = graph
        self._made_for = [*stages], config.schedule
        self._engine = Engine(
            type(graph).__name__,
            [stage.placement for stage in stages],
            [() for _ in stages],
            lambda: list(graph.modules()),
            config.schedule,
            moves=False,
        )

    def fits(self, stages: list[Stage], config: Any) -> bool:
        """Return whether this runner was made for the same stages and the same schedule.

        If so, the graph uses it again.
        """
        return self._made_for == ([*stages], config.schedule)

    def show(self, path: str | Path | None) -> str:
        """Return the schedule, and what each stage does in a micro-batch, as text.

        ``Graph.show`` calls it. With ``path``, the same is also written as an HTML page.
        """
        return show(self._engine, self._graph.config.micro_batches, path)

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run ``build`` on a batch, cut into micro-batches, and return its result.

        Backward runs where ``build`` calls it. ``Graph`` calls this for each batch.

        Args:
            args, kwargs: the arguments of ``build``.

        Raises:
            RuntimeError: the graph has an optimizer, and ``build`` calls backward on no loss.
        """
        graph = self._graph
        if not (graph.trains or torch.is_grad_enabled()):
            return self._engine.run(graph.build, args, kwargs, graph.config.micro_batches, None)
        # Only the ranks of a loss's stage scale it. The other ranks step with the scaler too, and
        # it can step only after it has scaled something: hence this zero.
        graph._scale(torch.zeros((), device=graph._device_type()))
        return self._engine.run(
            graph.build,
            args,
            kwargs,
            graph.config.micro_batches,
            graph._scale,
            needs_loss=graph.trains,
        )
