"""Pipeline parallelism for an ordinary module, whose code stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from mirrored.transports.default import current

from ..nn.parallelize import parallelize
from ..nn.recompute import recompute, recomputing
from ..spec import Placement, check_placement
from ..spec.nearest import suggestion
from ..spec.nested import arguments_of
from .cut import Cut, candidate_units, cut_at_names, cut_balanced
from .engine import Engine
from .measure import measure_units
from .micro_batches import rows_of
from .schedules import lines_of, stages_per_line
from .share import batch_axes, has_state, modules_of, plan_of_share, plans_of, share_of
from .show import show
from .stage import Stage, check_stages, set_stage
from .table import Schedule
from .tied import untie_parameters
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
    """Cut ``model`` into pipeline stages, in place.

    The parameters of each stage become global tensors on the stage's placement.

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
        model: the same module on every rank. The ops of its forward between the stages' modules are
            recorded for each shape of micro-batches, and may not depend on values of tensors.
        placements: either one placement for each stage; or distinct placements, over which a
            schedule that runs several stages on a placement distributes the stages in its own
            order.
        split: the names of the modules at which a stage begins, without the first stage; or "auto"
            for as many stages as the schedule has, balanced by their time on ``sample``, or by
            their number of parameters if there is no sample.
        loss: (model output, target) -> a tensor without dims. By default the attribute ``loss`` of
            the model output, or the output itself if it has no such attribute.
        micro_batches: the number of parts that each batch is cut into, along dim 0.
        schedule: "gpipe", "1f1b", "interleaved1f1b", "loopedbfs", "interleavedzerobubble",
            "zbvzerobubble", "dualpipev", or "one at a time".
        plan: the layouts of each stage's tensors over its placement, as ``parallelize`` takes it; a
            list has one plan for each stage. The batch is split along the axes along which every
            parameter is used whole. A ``Plan`` of the whole model serves all stages.
        reduction: whether the loss is a "mean" over rows or a "sum".
        sample: a batch for split="auto": a tensor, a tuple of arguments, or a dict of keywords.
        checkpoint: the names of modules whose activations are recomputed in backward instead of
            kept, with ``torch.utils.checkpoint`` at each call.

    Raises:
        TypeError: ``placements`` is a single placement.
        ValueError: a name is not a module, stages and placements do not fit the schedule, or a rank
            is in no stage.
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
    mark_recomputed(model, checkpoint)
    twins = Twins(model)
    try:
        cut = twins.keep_one_per_stage(_cut(model, placements, split, schedule, sample))
        stage_placements = _stage_placements(placements, len(cut.stages), schedule)
        plans = plans_of(model, plan, len(stage_placements))
    except BaseException:
        twins.restore_modules()
        raise
    # Before parallelize, so that each stage has its own leaf of a tied parameter to lay out.
    stage_modules = [modules_of(cut, stage) for stage in range(len(stage_placements))]
    tied = untie_parameters(stage_modules)
    splits = []
    for stage, placement in enumerate(stage_placements):
        share = share_of(cut, stage)
        parallelize(share, placement, plan_of_share(plans[stage], share))
        splits.append(batch_axes(share, placement))
        for unit in cut.stages[stage]:
            if has_state(unit.module):
                set_stage(unit.module, stage, placement)
    tied.restore_parameters()
    name = type(model).__name__
    engine = Engine(
        name,
        stage_placements,
        splits,
        lambda: list(model.modules()),
        schedule,
        moves=True,
        tied=tied,
    )
    pipe = Pipeline(model, engine, cut, loss, micro_batches, reduction)
    engine.table(micro_batches)  # raises now if the schedule cannot run this many micro-batches
    return pipe


class Pipeline:
    """A model cut into pipeline stages, made by ``pipeline``.

    Attributes:
        model: the module itself.
        micro_batches: the number of micro-batches of a step.
    """

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
        """Return the stages, each with its index and placement."""
        return [Stage(i, placement) for i, placement in enumerate(self._engine.placements)]

    @property
    def table(self) -> Schedule:
        """Return the schedule: for each placement its actions, in order."""
        return self._engine.table(self.micro_batches)

    def show(self, path: str | Path | None = None) -> str:
        """Return the schedule and the program of one micro-batch as text.

        With ``path``, also write both as a self-contained HTML page, with the stages side by side.
        Every rank returns the same text, without communication.

        Raises:
            RuntimeError: no step ran yet.
            ValueError: ``path`` does not end in .html.
        """
        return show(self._engine, self.micro_batches, path)

    def parts(self, stage: int) -> list[str]:
        """Return the names of the modules in a stage."""
        return [unit.name for unit in self._cut.stages[stage]]

    def step(self, batch: Any, target: Any = None, *, outputs: bool = False) -> Any:
        """Run forward and backward of a batch in micro-batches, and add gradients to ``.grad``.

        Args:
            batch: the model's argument; a tuple or list of several arguments, or a dict of
                keywords. Every rank passes the same whole batch.
            target: the second argument of the loss.
            outputs: return the model's output, too.

        Returns:
            the loss of the whole batch, a global tensor on the last stage's placement. Reading its
            value is a collective of all ranks. With ``outputs``: (loss, model output).

        Raises:
            ValueError: the batch cannot be cut.
            RuntimeError: ranks pass different batches, or one of them failed.
        """
        args, kwargs = arguments_of(batch)
        rows = rows_of(type(self.model).__name__, (args, kwargs))
        step_arguments = (args, kwargs, target, rows, outputs)
        with recomputing(self.model.modules()):
            return self._engine.run(
                self._training_step, step_arguments, {}, self.micro_batches, _unscaled
            )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the model's output for a batch, without gradients.

        Its tensors are global, on the placement of the stage that computed them.
        """
        rows = rows_of(type(self.model).__name__, (args, kwargs))
        count = min(self.micro_batches, rows)
        return self._engine.run(self._call_model, args, kwargs, count, None)

    def _call_model(self, *args: Any, **kwargs: Any) -> Any:
        return self.model(*args, **kwargs)

    def _training_step(
        self, args: tuple, kwargs: dict, target: Any, rows: int, outputs: bool
    ) -> Any:
        """Run forward, loss and backward of a micro-batch: the step that the engine records."""
        out = self.model(*args, **kwargs)
        loss = loss_of(self.model, self._loss, out, target)
        if self._reduction == "sum":
            # The engine weights each micro-batch's loss by its share of rows, as for a mean.
            loss = loss * (rows / rows_of("pipeline", (args, kwargs)))
        loss.backward()
        return (loss, out) if outputs else loss


def loss_of(model: nn.Module, loss: Loss | None, out: Any, target: Any) -> Any:
    """Return the loss of the model output ``out``.

    It is ``loss(out, target)``. Without ``loss`` it is the output's attribute ``loss``, or else the
    output itself. ``model`` is for the error.

    Raises:
        ValueError: the loss is not a tensor without dims.
    """
    value = getattr(out, "loss", out) if loss is None else loss(out, target)
    if not isinstance(value, torch.Tensor) or value.ndim:
        description = (
            f"a tensor of shape {tuple(value.shape)}"
            if isinstance(value, torch.Tensor)
            else f"a {type(value).__name__}"
        )
        raise ValueError(
            f"pipeline: the loss of {type(model).__name__} is {description}.\n"
            "  Backward begins at a tensor without dims.\n"
            "  Give loss=, such as torch.nn.functional.cross_entropy."
        )
    return value


def _unscaled(loss: Any) -> Any:
    return loss


# -- making it -------------------------------------------------------------------------------------


def mark_recomputed(model: nn.Module, names: Sequence[str]) -> None:
    """Mark the modules ``names`` of ``model``, whose activations are recomputed in backward.

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
    """Return the cut of ``model`` at ``split``, as for ``pipeline``."""
    if split != "auto":
        if isinstance(split, str):
            raise ValueError(
                f'pipeline: split is {split!r}. Give "auto", or a list of the names of modules.'
            )
        return cut_at_names(model, list(split))
    distinct = len(dict.fromkeys(placements))
    count_given = len(placements)
    count = count_given if count_given > distinct else distinct * stages_per_line(schedule)
    units = candidate_units(model, count)
    if sample is None:
        return cut_balanced(model, units, count, lambda unit: unit.numel)
    units, seconds = measure_units(model, units, sample)
    return cut_balanced(model, units, count, seconds)


def _stage_placements(
    placements: Sequence[Placement], count: int, schedule: str
) -> list[Placement]:
    """Return the placement of each of ``count`` stages.

    ``placements`` has one for each stage, or distinct ones, over which the schedule distributes the
    stages in its own order: P0, P1 for 4 stages -> P0, P1, P0, P1, or P0, P1, P1, P0.

    Raises:
        ValueError: the placements do not fit the schedule, two of them share only some ranks, or a
            rank is in no stage.
    """
    if len(placements) == count and len(set(placements)) < count or count == len(set(placements)):
        by_stage = list(placements)
    else:
        lines = list(dict.fromkeys(placements))
        by_stage = [lines[line] for line in lines_of(schedule, len(lines), count)]
    checked = check_stages("pipeline", [Stage(i, p) for i, p in enumerate(by_stage)])
    _check_ranks(list(checked.values()))
    return list(checked.values())


def _check_ranks(placements: Sequence[Placement]) -> None:
    """Raise if a rank of the world is in no placement."""
    inside = {rank for p in placements for rank in p.ranks.ravel().tolist()}
    idle = sorted(set(range(current().size)) - inside)
    if idle:
        raise ValueError(
            f"pipeline: rank {idle[0]} of {current().size} is in no stage: "
            + ", ".join(f"stage {i} is on {p}" for i, p in enumerate(placements))
            + ".\n  It would have nothing to do.\n"
            "  Put every rank in a stage, or start fewer processes."
        )
