"""pipeline: an ordinary module in stages, each on its own placement; its code is not touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import nn

from mirrored.transports.default import current

from ..nn.parallelize import parallelize, plan_of
from ..spec import B, Placement
from .cut import Cut, balanced, by_names, parts
from .engine import Engine
from .measure import measured
from .micro_batches import rows_of
from .schedules import lines_of, stages_per_line
from .stage import Stage, check_stages, set_stage
from .table import Schedule
from .tied import Tied, tied_places

Loss = Callable[[Any, Any], Any]


def pipeline(
    model: nn.Module,
    placements: Sequence[Placement],
    split: Literal["auto"] | Sequence[str] = "auto",
    *,
    loss: Loss | None = None,
    micro_batches: int = 8,
    schedule: str = "1f1b",
    plan: Any = None,
    reduction: Literal["mean", "sum"] = "mean",
    sample: Any = None,
) -> Pipeline:
    """Cut ``model`` into stages, in place: each stage's parameters become global tensors on its
    placement.

    ```
    pipe = consistent.nn.pipeline(model, [P0, P1], loss=F.cross_entropy, micro_batches=8)
    optimizer = torch.optim.AdamW(model.parameters())
    for batch, target in data:
        optimizer.zero_grad()
        loss = pipe.step(batch, target)
        optimizer.step()
    logits = pipe(batch)
    ```

    Args:
        model: the same module on every rank. What its forward does between the parts is recorded
            for each shape of micro-batches, and may not depend on values of tensors.
        placements: where stages run. Either one for each stage, or one for each line of the
            schedule: schedules that run several stages on a placement go around them.
        split: the names of the modules at which a stage begins, without the first; or "auto": as
            many stages as the schedule has, of about equal time on ``sample``, or without one of
            about equal numbers of parameters.
        loss: (what the model returns, target) -> a tensor without dims. Without it the model's
            own: the attribute ``loss`` of what it returns, or what it returns.
        micro_batches: how many parts each batch is cut into, along dim 0.
        schedule: "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble",
            "zbvzerobubble", "dualpipev", or "one at a time".
        plan: how each stage is laid out over its placement, as ``parallelize`` takes it; a list has
            one for each stage. Along axes where no parameter is split the batch is.
        reduction: whether the loss is a "mean" over rows or a "sum".
        sample: a batch for "auto": a tensor, a tuple of arguments, or a dict of keywords.

    Raises:
        ValueError: a name is no module, stages and placements do not fit the schedule, or a rank is
            in no stage.
    """
    cut = _cut(model, placements, split, schedule, sample)
    where = _placed(placements, len(cut.stages), schedule)
    _check_ranks(where)
    plans = list(plan) if isinstance(plan, list | tuple) else [plan] * len(where)
    if len(plans) != len(where):
        raise ValueError(
            f"pipeline: {len(plans)} plans are given for {len(where)} stages. Give one for each, "
            "or a single one for all."
        )
    tied = tied_places([_modules_of(cut, stage) for stage in range(len(where))])
    splits = []
    for stage, placement in enumerate(where):
        share = _share_of(cut, stage)
        parallelize(share, placement, plans[stage])
        splits.append(_batch_axes(share, placement))
        for unit in cut.stages[stage]:
            if _has_state(unit.module):
                set_stage(unit.module, stage, placement)
    engine = Engine(
        type(model).__name__, where, splits, lambda: list(model.modules()), schedule, moves=True
    )
    made = Pipeline(model, engine, cut, Tied(tied), loss, micro_batches, reduction)
    engine.table(micro_batches)
    return made


class Pipeline:
    """A model in stages; ``pipeline`` makes it. ``model`` is the module itself."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        cut: Cut,
        tied: Tied,
        loss: Loss | None,
        micro_batches: int,
        reduction: str,
    ) -> None:
        self.model, self.micro_batches = model, micro_batches
        self._engine, self._cut, self._tied = engine, cut, tied
        self._loss, self._reduction = loss, reduction

    @property
    def stages(self) -> list[Stage]:
        """Each stage and its placement."""
        return [Stage(i, placement) for i, placement in enumerate(self._engine.placements)]

    @property
    def table(self) -> Schedule:
        """What each placement does, in order."""
        return self._engine.table(self.micro_batches)

    def parts(self, stage: int) -> list[str]:
        """The names of the modules in a stage."""
        return [unit.name for unit in self._cut.stages[stage]]

    def step(self, batch: Any, target: Any = None, *, outputs: bool = False) -> Any:
        """Forward and backward of a batch, in micro-batches; gradients are added to ``.grad``.

        Args:
            batch: the model's argument; a tuple holds several, a dict keywords. Every rank passes
                the same, whole.
            target: the second argument of the loss.
            outputs: return what the model returns, too.

        Returns:
            the loss of the whole batch, a global tensor on the last stage's placement: every rank
            may ask for its value together. With ``outputs``: (loss, what the model returned).

        Raises:
            ValueError: the batch cannot be cut.
            RuntimeError: ranks pass other batches, or one of them failed.
        """
        args, kwargs = _arguments(batch)
        rows = rows_of(type(self.model).__name__, (args, kwargs))
        self._tied.begin()
        try:
            found = self._engine.run(
                self._trained, (args, kwargs, target, rows, outputs), {}, self.micro_batches, _as_is
            )
        finally:
            if self._tied:
                self._tied.end()
        return found

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for a batch, without gradients: a global tensor on the placement
        that made it."""
        rows = rows_of(type(self.model).__name__, (args, kwargs))
        count = min(self.micro_batches, rows)
        return self._engine.run(self._called, args, kwargs, count, None)

    def _called(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _trained(self, args: tuple, kwargs: dict, target: Any, rows: int, outputs: bool) -> Any:
        out = self.model(*args, **kwargs)
        if self._loss is not None:
            loss = self._loss(out, target)
        else:
            loss = getattr(out, "loss", out)
        if not isinstance(loss, torch.Tensor) or loss.ndim:
            said = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else (f"a {type(loss).__name__}")
            )
            raise ValueError(
                f"pipeline: the loss of {type(self.model).__name__} is {said}.\n"
                "  Backward begins at a tensor without dims.\n"
                "  Give loss=, such as torch.nn.functional.cross_entropy."
            )
        if self._reduction == "sum":
            loss = loss * (rows / rows_of("pipeline", (args, kwargs)))
        loss.backward()
        return (loss, out) if outputs else loss


def _as_is(loss: Any) -> Any:
    return loss


def _arguments(batch: Any) -> tuple[tuple, dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


# -- making it -------------------------------------------------------------------------------------


def _cut(
    model: nn.Module, placements: Sequence[Placement], split: Any, schedule: str, sample: Any
) -> Cut:
    if split != "auto":
        if isinstance(split, str):
            raise ValueError(
                f'pipeline: split is {split!r}. Give "auto", or a list of the names of modules.'
            )
        return by_names(model, list(split))
    lines = len(dict.fromkeys(placements))
    given = len(placements)
    count = given if given > lines else lines * stages_per_line(schedule)
    units = parts(model, count)
    if sample is None:
        return balanced(model, units, count, lambda unit: unit.numel)
    units, seconds = measured(model, units, sample)
    return balanced(model, units, count, seconds)


def _placed(placements: Sequence[Placement], count: int, schedule: str) -> list[Placement]:
    """The placement of each stage."""
    if len(placements) == count and len(set(placements)) < count or count == len(set(placements)):
        where = list(placements)
    else:
        lines = list(dict.fromkeys(placements))
        where = [lines[line] for line in lines_of(schedule, len(lines), count)]
    return list(check_stages("pipeline", [Stage(i, p) for i, p in enumerate(where)]).values())


def _check_ranks(placements: Sequence[Placement]) -> None:
    inside = {rank for p in placements for rank in p.ranks.ravel().tolist()}
    left = sorted(set(range(current().size)) - inside)
    if left:
        raise ValueError(
            f"pipeline: rank {left[0]} of {current().size} is in no stage: "
            + ", ".join(f"stage {i} is on {p}" for i, p in enumerate(placements))
            + ".\n  It would have nothing to do.\n"
            "  Put every rank in a stage, or start fewer processes."
        )


def _modules_of(cut: Cut, stage: int) -> list[nn.Module]:
    """What holds the parameters of a stage."""
    own: list[nn.Module] = [unit.module for unit in cut.stages[stage]]
    return own + [_holder(module) for module, at in cut.owners.values() if at == stage]


def _holder(module: nn.Module) -> nn.Module:
    """A module that has the parameters of ``module`` itself, and none of those inside it."""
    made = nn.Module()
    made._parameters = module._parameters
    return made


def _has_state(module: nn.Module) -> bool:
    """Whether it has parameters, or buffers that are saved: the others are constants, which every
    stage may compute with."""
    return any(
        x is not None and key not in each._non_persistent_buffers_set
        for each in module.modules()
        for key, x in (*each._parameters.items(), *each._buffers.items())
    )


def _share_of(cut: Cut, stage: int) -> nn.Module:
    """The parts of a stage under the names that they have in the model."""
    root = nn.Module()
    for name, (module, at) in cut.owners.items():
        if at == stage:
            _at(root, name)._parameters = module._parameters
    for unit in cut.stages[stage]:
        if _has_state(unit.module):
            path, _, key = unit.name.rpartition(".")
            _at(root, path)._modules[key] = unit.module
    return root


def _at(root: nn.Module, path: str) -> nn.Module:
    for key in path.split(".") if path else ():
        found = root._modules.get(key)
        if found is None:
            found = root._modules[key] = nn.Module()
        root = found
    return root


def _batch_axes(share: nn.Module, placement: Placement) -> tuple[int, ...]:
    """The axes along which every parameter is used whole."""
    layouts = list(plan_of(share).tensors.values())
    return tuple(
        axis for axis in range(placement.ndim) if all(each.use[axis] is B for each in layouts)
    )
