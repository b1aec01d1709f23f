"""Transfers of values between the stages of a program, while it is recorded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..spec import NdSbp, Placement, TensorSpec
from .effects import WriteChecker
from .program import StagesProgram, StageTransfer
from .recorded_values import RecordedValues
from .stand_ins import stand_in_of_spec

LayoutOf = Callable[[int, tuple[int, ...]], NdSbp]


class Transfers:
    """Recorder of the moves of a program; each value is moved once to a stage, for all its uses.

    Args:
        program: the program, to whose ``moves`` each new one is appended.
        values: its values.
        effects: the detector of in-place writes, which is notified of each move.
        stages: stage number -> placement.
        layout_of: (stage, logical shape) -> the SBP in which a tensor enters the stage.
        automatic: whether a tensor of an earlier stage is moved to where it is used.
    """

    def __init__(
        self,
        program: StagesProgram,
        values: RecordedValues,
        effects: WriteChecker,
        stages: Mapping[int, Placement],
        layout_of: LayoutOf,
        automatic: bool,
    ) -> None:
        self._program, self._values, self._effects = program, values, effects
        self._stages, self._layout_of, self._automatic = stages, layout_of, automatic
        self._arrived_tensors: dict[tuple[int, int, TensorSpec], Any] = {}

    def move_if_needed(self, x: torch.Tensor, stage: int, what: str, line: str) -> Any:
        """Return ``x`` for use in ``stage``: a global tensor of another stage is moved there.

        ``what`` is the call that uses it, and ``line`` its source line, for errors.

        Raises:
            RuntimeError: it would be moved, and moves are not automatic.
        """
        if not is_global(x) or self._values.stage_of(x) == stage:
            return x
        spec: TensorSpec = x._spec  # type: ignore[attr-defined]
        placement = self._stages[stage]
        if spec.placement == placement:
            return self.move(x, stage, spec, line)
        if not self._automatic:
            raise RuntimeError(
                f"{what}, at {line}: one of its tensors is {spec}, and stage {stage} is on "
                f"{placement}.\n  Data moves between placements where the program says so.\n"
                "  Move it first: x.to_global(placement=...)."
            )
        target = TensorSpec.of(
            placement, self._layout_of(stage, spec.shape), spec.shape, spec.dtype
        )
        return self.move(x, stage, target, line)

    def move(self, x: Any, stage: int, target: TensorSpec, line: str) -> Any:
        """Send ``x`` to ``stage`` with the spec ``target``; return the tensor that arrives."""
        source = self._values.number(x)
        self._effects.check_read(source, stage, "what is moved", line)
        key = source, stage, target
        if key not in self._arrived_tensors:
            new_tensor = stand_in_of_spec(target, x.requires_grad)
            arrived_number = self._values.add(new_tensor, stage)
            sender = self._values.stage_of(x)
            assert sender is not None
            moves = self._program.moves
            moves.append(StageTransfer(len(moves), source, arrived_number, sender, stage, line))
            self._effects.note_transfer(x, moves[-1])
            # A view, because torch refuses writes in place into a leaf that requires grad.
            self._arrived_tensors[key] = (
                new_tensor.view_as(new_tensor) if new_tensor.requires_grad else new_tensor
            )
            self._values.alias(self._arrived_tensors[key], arrived_number)
            self._effects.note_copy(source, stage, self._arrived_tensors[key])
        return self._arrived_tensors[key]

    def next_on(self, target: TensorSpec, stage: int, line: str) -> int:
        """Return the first stage from ``stage`` on whose placement is that of ``target``.

        Raises:
            ValueError: there is none.
        """
        for index, placement in self._stages.items():
            if index >= stage and placement == target.placement:
                return index
        raise ValueError(
            f"{self._program.name}: at {line} a tensor of stage {stage} moves to "
            f"{target.placement}, where none of the stages from {stage} on is: "
            + ", ".join(f"stage {i} is on {p}" for i, p in self._stages.items())
            + ".\n  A batch passes stages 0, 1, 2, ... once.\n  Set a stage there."
        )
