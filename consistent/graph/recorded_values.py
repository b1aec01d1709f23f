"""Values of a program of stages while it is recorded: which tensor stands for which value."""

from __future__ import annotations

from collections.abc import KeysView, Mapping
from typing import Any

import torch

from ..dispatch.plans.shards import is_global
from ..spec import Placement
from ..spec.nested import tensors_in
from .program import ProgramValue, StagesProgram
from .stand_ins import stand_in


class RecordedValues:
    """Table of the tensors of a program: which stand-in (tensor without values) has which number.

    Stand-ins are found by their ids, so all of them are kept alive.

    Args:
        program: the program, to whose ``values`` each new one is appended.
        stages: stage number -> placement.
    """

    def __init__(self, program: StagesProgram, stages: Mapping[int, Placement]) -> None:
        # id of a stand-in for a parameter -> (where the parameter is kept, its key).
        self.places: dict[int, Any] = {}
        self._program, self._stages = program, stages
        self._numbers: dict[int, int] = {}  # id of a stand-in -> number of its value
        self._kept_alive: list[Any] = []
        # Id of a tensor from before the step -> its stand-in.
        self._earlier_stand_ins: dict[int, Any] = {}

    def add(self, x: Any, stage: int | None) -> int:
        """Append the value that ``x`` stands for, which ``stage`` makes; return its number."""
        spec = x._spec if is_global(x) else None
        self._program.values.append(
            ProgramValue(spec, tuple(x.shape), x.dtype, bool(x.requires_grad), stage)
        )
        return self.alias(x, len(self._program.values) - 1)

    def alias(self, x: Any, number: int) -> int:
        """Let ``x`` stand for the value with this number too; return the number."""
        self._numbers[id(x)] = number
        self._kept_alive.append(x)
        return number

    def number(self, x: torch.Tensor) -> int:
        """Return the number of the value that ``x`` stands for."""
        return self._numbers[id(x)]

    def numbers(self, given: Any) -> list[int]:
        """Return the numbers of the values that the arguments ``given`` hold."""
        return [self.number(x) for x in tensors_in(given)]

    def ids(self) -> KeysView[int]:
        """Return the ids of all stand-ins."""
        return self._numbers.keys()

    def stage_of(self, x: torch.Tensor) -> int | None:
        """Return the stage that makes the value of ``x``; None for a plain tensor."""
        return self._program.values[self.number(x)].stage

    def latest_stage(self, given: Any) -> int | None:
        """Return the last stage that made a global tensor in ``given``; None if all are plain.

        A call outside the modules of stages runs in this stage.
        """
        stages = [self.stage_of(x) for x in tensors_in(given) if is_global(x)]
        return max((stage for stage in stages if stage is not None), default=None)

    def stage_on(self, x: Any) -> int | None:
        """Return the first stage on the placement of ``x``; None for a plain tensor.

        Raises:
            ValueError: ``x`` is a global tensor, and no stage is on its placement.
        """
        if not is_global(x):
            return None
        placement = x._spec.placement  # type: ignore[attr-defined]
        for index, stage_placement in self._stages.items():
            if stage_placement == placement:
                return index
        raise ValueError(
            f"{self._program.name}: a tensor is on {placement}, where no stage is: "
            + ", ".join(f"stage {i} is on {p}" for i, p in self._stages.items())
            + ".\n  Every tensor of the program is on the placement of a stage.\n"
            "  Move it there, or set a stage on its placement."
        )

    def stand_in_for(self, x: torch.Tensor, line: str) -> Any:
        """Return the stand-in for a tensor that a call uses, or ``x`` itself if it is one.

        A tensor from before the recording gets a stand-in at its first use. ``line`` is the user's
        source line.

        Raises:
            RuntimeError: something made ``x`` that is not recorded.
            ValueError: ``x`` is a plain parameter, or on a placement of no stage.
        """
        if id(x) in self._numbers:
            recorded_spec = self._program.values[self.number(x)].spec
            if recorded_spec is not (x._spec if is_global(x) else None):  # type: ignore[attr-defined]
                raise RuntimeError(
                    f"{self._program.name}: at {line} a global tensor is used that was made, "
                    "or laid out again, in the program itself.\n"
                    "  What makes global tensors is not recorded.\n"
                    "  Make it before, and pass it as an argument, or let a stage's module make it."
                )
            return x
        if id(x) in self.places:
            owner, key = self.places[id(x)]
            value = self._program.values[self.add(x, self.stage_on(x))]
            value.read, value.name = lambda: getattr(owner, key), key
            return x
        if x.is_meta and not is_global(x):
            raise RuntimeError(
                f"{self._program.name}: at {line} a tensor's values or its shard are asked "
                "for, or a tensor is used that something made which is not recorded.\n"
                "  What lies between the modules of stages is recorded once, without values.\n"
                "  Do it inside a stage's module, or before the step."
            )
        return self._stand_in_of_earlier(x, line)

    def _stand_in_of_earlier(self, x: torch.Tensor, line: str) -> Any:
        """Return the stand-in for a tensor from before the step, which the program reads itself."""
        if id(x) not in self._earlier_stand_ins:
            if x.requires_grad and not is_global(x):
                raise ValueError(
                    f"{self._program.name}: at {line} a plain tensor of shape "
                    f"{tuple(x.shape)} that requires grad is used.\n  The parameters of a program "
                    "of stages lie on the placement of a stage.\n"
                    "  Put it there: consistent.parallelize(module, placement)."
                )
            new_stand_in = self._earlier_stand_ins[id(x)] = stand_in(x)
            self._program.values[self.add(new_stand_in, self.stage_on(x))].read = lambda: x
            self._kept_alive.append(x)
        return self._earlier_stand_ins[id(x)]
