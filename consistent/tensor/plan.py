"""Plan: what a dispatch key stands for, and the caches that hold plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..boxing.choose import Choice
from ..rules.signature import Call
from ..spec import Placement, TensorSpec
from . import _C

MAX_PLANS = 1 << 16


class Plan:
    """What a key stands for. Plain data: it prints, and tests compare it."""

    __slots__ = (
        "kind",
        "name",
        "run",
        "outs",
        "boxes",
        "adopt",
        "template",
        "choice",
        "specs",
        "call",
        "inplace",
        "placement",
        "constant",
        "outside",
        "fast",
        "sizes",
        "put_back",
        "told",
        "stand_in",
        "kept",
        "counted",
        "said",
    )

    kind: str  # "direct", "run", "template", "form", "whole", "list", "open", "constant", "handler"
    name: str
    run: Callable[..., Any]
    outs: tuple[TensorSpec, ...]
    boxes: tuple[tuple[int, TensorSpec], ...]
    adopt: tuple[int, ...]
    template: tuple[tuple, dict] | None
    choice: Choice | None
    specs: tuple[TensorSpec, ...]
    call: Call
    inplace: bool
    placement: Placement
    constant: Any
    outside: bool  # this rank is not in the placement and follows on meta tensors
    told: bool  # the outcome is known only by doing it, and ranks outside the placement are told
    stand_in: bool  # this rank is outside, and the op's backward on meta tensors asks for values
    fast: bool  # nothing to box, adopt or fill in: run, retype, return
    put_back: tuple[
        tuple[int, TensorSpec], ...
    ]  # those of boxes that the op writes to: what is written goes back
    kept: bool  # whether the key finds it again: getters of properties are other objects each time
    said: tuple[bool, ...]  # outside, where torch has no op on meta: which outs have gradients
    counted: bool  # the form gives (result, logical shapes of its tensors)
    sizes: tuple | None  # what follows the one tensor argument, with sizes rewritten for the shard

    def __init__(self, kind: str, name: str, run: Callable[..., Any]):
        self.kind, self.name, self.run = kind, name, run
        self.outs, self.boxes, self.adopt = (), (), ()
        self.template, self.choice, self.inplace = None, None, False
        self.specs, self.constant, self.outside = (), None, False
        self.fast, self.sizes, self.put_back, self.told = False, None, (), False
        self.stand_in, self.kept, self.counted = False, True, False
        self.said = ()

    @property
    def settled(self) -> bool:
        """Whether ``constant`` is the answer to every such call."""
        return self.kind == "constant"

    @property
    def as_called(self) -> bool:
        """Whether ``run`` takes the call as it came, and its answer is the answer."""
        return self.kind == "open" or self.kind == "handler"

    def __repr__(self) -> str:
        boxes = ", ".join(f"{i} to {spec.sbp}" for i, spec in self.boxes)
        outs = ", ".join(str(spec.sbp) for spec in self.outs)
        return f"{self.name}: {self.kind}" + (f", box {boxes}" if boxes else "") + f" -> {outs}"


# First level: the full key, and for some ops facts that a key leaves out. Second level, for shapes
# not met before: the choice of signature, and the dtypes.
plans = _C.PlanTable()
exact_plans: dict[tuple, Plan] = {}
choices: dict[tuple, Choice] = {}
dtypes: dict[tuple, tuple[torch.dtype, ...]] = {}
# Ops answered without planning, and plans of the ops over lists of tensors; modules on higher
# floors enter them.
handlers: dict[str, Callable[..., Any]] = {}
list_ops: dict[str, Callable[..., Plan]] = {}
# Called with (plan, specs, outs) after each op while a report is open; empty costs one truth test.
observers: list[Callable[[Plan, Sequence[TensorSpec], Sequence[TensorSpec]], None]] = []


# Called with each plan as it is made.
watchers: list[Callable[[Plan], None]] = []


def clear_plans() -> None:
    """Forget all plans, as after a change of the process group."""
    plans.clear()
    exact_plans.clear()
    choices.clear()
    dtypes.clear()
