"""Mark modules as a stage: a part of a program that runs on its own placement.

```
stage 0 on ranks 0, 1      stage 1 on ranks 2, 3
x -> blocks 0, 1 ........> blocks 2, 3 -> loss        activations move between placements,
        <................                             and gradients back
```
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ..spec import Placement
from ..tensor.making.create import check_world

_MARK = "_consistent_stage"


@dataclass(frozen=True)
class Stage:
    """Stage of a program: its index and the placement where it runs.

    A batch passes the stages in the order of their index.
    """

    index: int
    placement: Placement

    def __str__(self) -> str:
        return f"stage {self.index} on {self.placement}"


def set_stage(module: torch.nn.Module, index: int, placement: Placement) -> None:
    """Mark ``module`` as stage ``index``, or as a part of it, to run on ``placement``.

    Raises:
        ValueError: ``index`` is negative.
        RuntimeError: the placement names ranks that the world does not have.
    """
    if index < 0:
        raise ValueError(
            f"set_stage: stage_id is {index}. Stages are numbered 0, 1, 2, ... in the order in "
            "which a batch passes them."
        )
    check_world("set_stage", placement)
    module.__dict__[_MARK] = Stage(index, placement)


def stage_of(module: torch.nn.Module) -> Stage | None:
    """Return the stage that ``set_stage`` marked ``module`` with; None without a mark."""
    return module.__dict__.get(_MARK)


def check_stages(what: str, stages: Sequence[Stage]) -> dict[int, Placement]:
    """Return {index: placement} of the stages, ordered by index, after checking that they can run.

    Args:
        what: the caller's name for error messages.
        stages: the stages in any order; one may occur several times.

    Raises:
        ValueError: a number is missing, a stage has two placements, or two placements share some
            ranks but not all.
    """
    placements: dict[int, Placement] = {}
    for stage in stages:
        placement = placements.setdefault(stage.index, stage.placement)
        if placement != stage.placement:
            raise ValueError(
                f"{what}: stage {stage.index} is on {placement} and on {stage.placement}.\n"
                "  All modules of one stage run on one placement.\n"
                "  Give one of them another stage_id."
            )
    missing = sorted(set(range(max(placements, default=-1) + 1)) - set(placements))
    if missing:
        raise ValueError(
            f"{what}: stages {sorted(placements)} are given, and stage {missing[0]} is not.\n"
            "  Stages are numbered 0, 1, 2, ... in the order in which a batch passes them.\n"
            "  Number them without a gap."
        )
    ordered = {index: placements[index] for index in sorted(placements)}
    _check_overlap(what, ordered)
    return ordered


def _check_overlap(what: str, placements: dict[int, Placement]) -> None:
    """Raise if two placements share some ranks but not all."""
    pairs = list(placements.items())
    for k, (i, a) in enumerate(pairs):
        for j, b in pairs[:k]:
            shared = set(a.ranks.ravel().tolist()) & set(b.ranks.ravel().tolist())
            if shared and a != b:
                raise ValueError(
                    f"{what}: stage {j} is on {b} and stage {i} on {a}; they share rank "
                    f"{min(shared)} but not all ranks.\n"
                    "  A rank runs the actions of one line of the schedule.\n"
                    "  Give both stages the same placement, or placements without common ranks."
                )
