"""``Strategy``: the result of a search, which can be printed, saved, loaded and applied to a
model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from mirrored.transports.default import current

from ...nn.plan import Plan, yaml_text
from ...nn.plan.files import read_strategy, strategy_text
from ...nn.planners import plan_for
from ...nn.slots import plain_slots
from ...pipeline.pipeline import Pipeline, pipeline
from ...spec import Placement
from .estimates import StrategyChoice
from .one_stage import OneStage

SCHEDULE = "1f1b"


@dataclass(frozen=True)
class Strategy:
    """Parallel strategy for training a model: stages, mesh axes, micro-batches and layouts.

    ```
    strategy = consistent.search(model, 8, batch, machine="a100-8").best
    strategy.save("strategy.yaml")                       # where the search ran

    strategy = consistent.auto.Strategy.load("strategy.yaml")    # on ranks
    pipe = strategy.apply(model, loss=F.cross_entropy)
    optimizer = torch.optim.AdamW(model.parameters())
    loss = pipe.step(batch, target)
    optimizer.step()
    ```

    Args:
        device_type: "cpu" or "cuda".
        stages: number of stages.
        data: ranks along the axis "dp"; ``on`` adapts this number to another number of ranks.
        tensor: ranks along the axis "tp".
        split: names of the modules at which stages begin, without the first.
        micro_batches: number of micro-batches of a batch.
        checkpoint: names of the modules whose forward is recomputed in backward.
        plan: layouts of all tensors on a stage's placement, whose axes are "dp" and "tp", without
            axes of one rank.
    """

    device_type: str
    stages: int
    data: int
    tensor: int
    split: tuple[str, ...]
    micro_batches: int
    checkpoint: tuple[str, ...]
    plan: Plan

    @property
    def ranks(self) -> int:
        """Number of ranks that the strategy is for."""
        return self.stages * self.data * self.tensor

    def on(self, ranks: int) -> Strategy:
        """Return this strategy for another number of ranks, with more or fewer of them along "dp".

        Raises:
            ValueError: ``ranks`` is not a multiple of stages x tensor, or there was no axis "dp".
        """
        if ranks == self.ranks:
            return self
        smallest = self.stages * self.tensor
        data, rest = divmod(ranks, smallest)
        if rest or not data or (data > 1) != (self.data > 1):
            possible = ", ".join(str(n * smallest) for n in (range(2, 6) if self.data > 1 else [1]))
            raise ValueError(
                f"Strategy: it is for {self.ranks} ranks ({self}), and there are {ranks}.\n"
                '  Along "dp", and along nothing else, other numbers of ranks serve as well: '
                f"{possible}, ...\n  Start so many, or search again for {ranks}."
            )
        return replace(self, data=data)

    def placements(self) -> list[Placement]:
        """Return the placement of each stage, in order."""
        grid = np.arange(self.ranks).reshape(self.stages, self.data, self.tensor)
        sizes = {"dp": self.data, "tp": self.tensor}
        axes = tuple(name for name, n in sizes.items() if n > 1)
        shape = [sizes[name] for name in axes]
        return [
            Placement(self.device_type, part.reshape(shape or [1]), axes=axes or None)
            for part in grid
        ]

    def apply(
        self,
        model: nn.Module,
        loss: Callable[[Any, Any], Any] | None = None,
        *,
        reduction: Any = "mean",
    ) -> Pipeline | OneStage:
        """Parallelize ``model`` in place on the ranks of this world; every rank calls this.

        ``loss`` and ``reduction`` are those of ``consistent.nn.pipeline``. With one stage and one
        micro-batch the model runs as it is written; under every other strategy it is recorded, as
        in ``pipeline``.

        Raises:
            ValueError: the strategy does not fit the world's number of ranks; or the model is not
                the one that was searched for.
        """
        adapted = self.on(current().size)
        placements = adapted.placements()
        if adapted.stages == 1 and adapted.micro_batches == 1:
            return OneStage(model, placements[0], adapted.plan, loss, adapted.checkpoint)
        return pipeline(
            model,
            placements,
            list(adapted.split),
            loss=loss,
            micro_batches=adapted.micro_batches,
            schedule=SCHEDULE,
            plan=adapted.plan,
            reduction=reduction,
            checkpoint=adapted.checkpoint,
        )

    def save(self, path: str | Path) -> Path:
        """Write the strategy as YAML: its plan, as ``Plan.save`` writes it, and its numbers."""
        numbers = {
            "device_type": self.device_type,
            "stages": self.stages,
            "data": self.data,
            "tensor": self.tensor,
            "micro_batches": self.micro_batches,
            "split": list(self.split),
            "checkpoint": list(self.checkpoint),
        }
        return yaml_text.write(path, self.plan.yaml() + strategy_text(numbers))

    @classmethod
    def load(cls, path: str | Path) -> Strategy:
        """Read a file that ``save`` wrote, possibly edited.

        Raises:
            ValueError: the file is not a strategy.
        """
        fields, plan = read_strategy(yaml_text.read(path), str(path))
        return cls(
            split=tuple(fields.pop("split")),
            checkpoint=tuple(fields.pop("checkpoint")),
            plan=Plan(**plan),
            **fields,
        )

    def __str__(self) -> str:
        parts = [f"{self.stages} stages" if self.stages > 1 else "one stage"]
        parts += [f"dp {self.data}", f"tp {self.tensor}", f"{self.micro_batches} micro-batches"]
        if self.checkpoint:
            parts.append(f"{len(self.checkpoint)} modules computed again")
        return ", ".join(parts)


def strategy_for(
    model: nn.Module,
    choice: StrategyChoice,
    split: Sequence[str],
    repeated: Sequence[str],
    device: str,
) -> Strategy:
    """Return ``choice`` as a ``Strategy`` for ``model``, with names of modules and a plan.

    Args:
        split: names of the units at which stages begin, without the first.
        repeated: names of the units to recompute in backward, if the choice recomputes.
        device: "cpu" or "cuda".
    """
    strategy = Strategy(
        device,
        choice.stages,
        choice.data,
        choice.tensor,
        tuple(split),
        choice.micro_batches,
        tuple(repeated) if choice.recompute else (),
        Plan(),
    )
    placement = replace(strategy, device_type="cpu").placements()[0]
    # Made for the whole model, since an output head is recognized by the embedding, which may be in
    # another stage.
    plan = plan_for(model, plain_slots(model), placement, choice.plan or "data")
    return replace(strategy, plan=plan)
