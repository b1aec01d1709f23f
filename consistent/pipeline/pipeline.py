"""pipeline: an ordinary module in stages, each on its own placement; its code is not touched."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mirrored.transports.default import current

from ..nn.parallelize import parallelize
from ..nn.recompute import recompute, recomputing
from ..spec import Placement, check_placement
from ..spec.nearest import suggestion
from .cut import Cut, balanced, by_names, parts
from .engine import Engine
from .measure import measured
from .micro_batches import rows_of
from .schedules import lines_of, stages_per_line
from .share import batch_axes, has_state, modules_of, plan_of_share, plans_of, share_of
from .show import show
from .stage import Stage, check_stages, set_stage
from .table import Schedule
from .tied import untie
from .twins import Twins

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
    checkpoint: Sequence[str] = (),
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
            one for each stage. Along axes where no parameter is split the batch is. A ``Plan`` of
            the whole model serves all stages.
        reduction: whether the loss is a "mean" over rows or a "sum".
        sample: a batch for "auto": a tensor, a tuple of arguments, or a dict of keywords.
        checkpoint: names of modules whose activations backward computes again, instead of keeping
            them: ``torch.utils.checkpoint`` at each of their calls.

    Raises:
        ValueError: a name is not a module, stages and placements do not fit the schedule, or a
            rank is in no stage.
    """
    if isinstance(placements, Placement | int):
        raise TypeError(
            f"pipeline: placements is {placements!r}, and each stage, or line of the schedule, has "
            'one of its own. Write [placement("cpu", [0]), placement("cpu", [1])].'
        )
    if not placements:
        raise ValueError(
            "pipeline: placements is empty, so there is no stage. Give one placement for each "
            "stage, or one for each line of the schedule."
        )
    for placement in placements:
        check_placement("pipeline", placement)
    mark(model, checkpoint)
    twins = Twins(model)
    try:
        cut = twins.settled(_cut(model, placements, split, schedule, sample))
        where = _placed(placements, len(cut.stages), schedule)
        plans = plans_of(model, plan, len(where))
    except BaseException:
        twins.take_back()
        raise
    held = [modules_of(cut, stage) for stage in range(len(where))]
    tied = untie(held)
    splits = []
    for stage, placement in enumerate(where):
        share = share_of(cut, stage)
        parallelize(share, placement, plan_of_share(plans[stage], share))
        splits.append(batch_axes(share, placement))
        for unit in cut.stages[stage]:
            if has_state(unit.module):
                set_stage(unit.module, stage, placement)
    tied.join()
    name = type(model).__name__
    engine = Engine(
        name, where, splits, lambda: list(model.modules()), schedule, moves=True, tied=tied
    )
    made = Pipeline(model, engine, cut, loss, micro_batches, reduction)
    engine.table(micro_batches)
    return made


class Pipeline:
    """A model in stages; ``pipeline`` makes it. ``model`` is the module itself."""

    def __init__(
        self,
        model: nn.Module,
        engine: Engine,
        cut: Cut,
        loss: Loss | None,
        micro_batches: int,
        reduction: str,
    ) -> None:
        self.model, self.micro_batches = model, micro_batches
        self._engine, self._cut = engine, cut
        self._loss, self._reduction = loss, reduction

    @property
    def stages(self) -> list[Stage]:
        """Each stage and its placement."""
        return [Stage(i, placement) for i, placement in enumerate(self._engine.placements)]

    @property
    def table(self) -> Schedule:
        """What each placement does, in order."""
        return self._engine.table(self.micro_batches)

    def show(self, path: str | Path | None = None) -> str:
        """The schedule, and the program of a micro-batch by stages, as text. With ``path`` also as
        an HTML page that needs nothing beside it, with the stages side by side. Nothing is
        communicated, and every rank has the same.

        Raises:
            RuntimeError: no step ran yet.
            ValueError: ``path`` does not end in .html.
        """
        return show(self._engine, self.micro_batches, path)

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
        args, kwargs = arguments_of(batch)
        rows = rows_of(type(self.model).__name__, (args, kwargs))
        given = (args, kwargs, target, rows, outputs)
        with recomputing(self.model.modules()):
            return self._engine.run(self._trained, given, {}, self.micro_batches, _as_is)

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
        loss = loss_of(self.model, self._loss, out, target)
        if self._reduction == "sum":
            loss = loss * (rows / rows_of("pipeline", (args, kwargs)))
        loss.backward()
        return (loss, out) if outputs else loss


def loss_of(model: nn.Module, loss: Loss | None, out: Any, target: Any) -> Any:
    """The loss of what ``model`` returned: that of ``loss``, or without it the model's own.

    Raises:
        ValueError: it is not a tensor without dims.
    """
    found = getattr(out, "loss", out) if loss is None else loss(out, target)
    if not isinstance(found, torch.Tensor) or found.ndim:
        said = (
            f"a tensor of shape {tuple(found.shape)}"
            if isinstance(found, torch.Tensor)
            else f"a {type(found).__name__}"
        )
        raise ValueError(
            f"pipeline: the loss of {type(model).__name__} is {said}.\n"
            "  Backward begins at a tensor without dims.\n"
            "  Give loss=, such as torch.nn.functional.cross_entropy."
        )
    return found


def _as_is(loss: Any) -> Any:
    return loss


def arguments_of(batch: Any) -> tuple[tuple, dict[str, Any]]:
    """(args, kwargs) of a batch: a tensor, a tuple or list of arguments, a mapping of keywords."""
    if isinstance(batch, Mapping):
        return (), dict(batch)
    return (tuple(batch), {}) if isinstance(batch, list | tuple) else ((batch,), {})


# -- making it -------------------------------------------------------------------------------------


def mark(model: nn.Module, names: Sequence[str]) -> None:
    """Mark the modules of these names: backward computes their activations again.

    Raises:
        ValueError: a name is not a module.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    for name in names:
        if name not in known:
            raise ValueError(
                f"pipeline: checkpoint names {name!r}, which is not a module of "
                f"{type(model).__name__}.{suggestion(name, known)}\n"
                "  The activations of whole modules are computed again.\n"
                "  List them with model.named_modules()."
            )
        recompute(known[name])


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
    found = check_stages("pipeline", [Stage(i, p) for i, p in enumerate(where)])
    _check_ranks(list(found.values()))
    return list(found.values())


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
