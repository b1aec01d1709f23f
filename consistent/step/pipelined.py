"""The step of a graph with stages, in several micro-batches at once."""

from __future__ import annotations

from typing import Any

from ..pipeline.engine import Engine
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

    def run(self, args: tuple, kwargs: dict[str, Any]) -> Any:
        """What ``build`` returns for a batch, backward included where there are optimizers."""
        graph = self._graph
        scale = graph._scale if graph.trains else None
        return self._engine.run(graph.build, args, kwargs, graph.config.micro_batches, scale)
