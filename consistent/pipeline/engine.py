"""Run a step with pipeline stages on a batch: compare ranks, cut, record, run, join results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrored.every_rank import agree, alike, by_rank, gathered
from mirrored.transports.default import current
from mirrored.transports.faults.place import user_line

from ..dispatch.planning import autocast
from ..dispatch.plans.gradients import set_raw_grad
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..graph.program import Ref, StagesProgram, refs
from ..graph.reads import answer_text
from ..graph.record import record
from ..graph.stand_ins import of_spec
from ..movement.world import my_coordinate
from ..spec import B, NdSbp, Placement, S
from ..spec.nested import map_each, map_tensors, tensors_in
from .cell import Cell
from .fits import fits
from .micro_batches import cut, cuts, joined, rows_of
from .part import check_written, part_of
from .run import MicroBatch, Run, run_all
from .schedules import schedule
from .stage import stage_of
from .table import Schedule
from .tied import Tied

MOST = 16  # recorded programs that an engine caches; another one drops the oldest


@dataclass
class Engine:
    """Runner of a staged program, with the cache of the programs that it recorded.

    Both ``consistent.nn.pipeline`` and steps that mark their modules with stages run by one.

    Args:
        name: the name in error messages.
        placements: the placement of each stage, in order.
        splits: for each stage, the axes of its placement along which a batch is split.
        modules: returns all modules that the program calls.
        schedule: the name of the schedule.
        moves: whether tensors are moved between stages automatically, without a move in the
            program.
        tied: the parameters that several stages use.
    """

    name: str
    placements: Sequence[Placement]
    splits: Sequence[Sequence[int]]
    modules: Callable[[], list[torch.nn.Module]]
    schedule: str
    moves: bool
    tied: Tied = field(default_factory=Tied)
    _programs: list[tuple[Any, StagesProgram]] = field(
        default_factory=list
    )  # the newest at the end

    def table(self, count: int) -> Schedule:
        """Return the schedule's table (the actions of each placement) for ``count`` micro-batches.

        Raises:
            ValueError: the schedule cannot run this number of micro-batches, or runs a stage on
                another placement than its own.
        """
        lines = list(dict.fromkeys(self.placements))
        made = schedule(self.schedule, len(lines), len(self.placements), count)
        for stage, placement in enumerate(self.placements):
            if lines[made.line_of[stage]] != placement:
                wanted = lines[made.line_of[stage]]
                raise ValueError(
                    f"{self.name}: stage {stage} is on {placement}, and the schedule "
                    f"{self.schedule!r} runs it on {wanted}.\n"
                    f"  It runs stages 0, 1, ... on placements {list(made.line_of)} of {lines}.\n"
                    "  Place the stages so, or take another schedule."
                )
        return made

    def run(
        self,
        step: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        count: int,
        scale: Callable[[Any], Any] | None,
        needs_loss: bool = True,
    ) -> Any:
        """Return the result of ``step(*args, **kwargs)`` on a batch, run in micro-batches.

        The step is recorded as a program, unless a program from an earlier run fits the
        micro-batch. Then each rank runs its stages' parts of the programs, and the micro-batches'
        results are joined.

        Args:
            step: the function to record and run.
            args: its arguments, with the whole batch.
            kwargs: its keyword arguments.
            count: the number of micro-batches.
            scale: is applied to each loss before backward, after the loss was weighted by its
                micro-batch's share of the rows; None: run no backward.
            needs_loss: whether a ``step`` that calls backward on no loss raises; if False, only
                the forward of such a step is run.

        Raises:
            ValueError: the batch, the stages or the schedule do not fit.
            RuntimeError: ranks disagree on the batch, one of them failed, backward is called on no
                loss where one is needed, or on a loss without gradients.
        """
        with self.tied.shown():
            return self._run(step, args, kwargs, count, scale, needs_loss)

    def _run(
        self,
        step: Callable[..., Any],
        args: tuple,
        kwargs: dict[str, Any],
        count: int,
        scale: Callable[[Any], Any] | None,
        needs_loss: bool,
    ) -> Any:
        rows = rows_of(self.name, (args, kwargs))
        self._agree(args, kwargs, count)
        parts = cuts(self.name, rows, count)
        table = self.table(count)
        batch, draws = [], generator.get_state().counter
        given_parts = [cut((args, kwargs), rows, *part) for part in parts]
        programs = self._programs_of(step, given_parts, [n for _, n in parts], scale is not None)
        if not self._has_losses(_unlike(programs), scale is not None, needs_loss):
            scale = None
        for given, (_, size), program in zip(given_parts, parts, programs, strict=True):
            share = None if scale is None else _share(scale, size / rows)
            batch.append(MicroBatch(program, tensors_in(given), draws, share))
            draws += program.draws
        going = Run(table if scale is not None else table.forwards(), self.placements, batch)
        self.tied.begin()
        with torch.set_grad_enabled(scale is not None):
            run_all(going)
        # Lines set the count as they run, and ranks run different lines. Set one count on all.
        if draws != generator.get_state().counter:
            generator.set_count(torch.default_generator, draws)
        if scale is not None:
            self._follow_gradients(_unlike(programs))
            self.tied.end()
        results = [self._result(given, found) for given, found in zip(batch, going.results)]
        return joined(self.name, results, [size for _, size in parts])

    # -- programs ----------------------------------------------------------------------------------

    @property
    def programs(self) -> list[StagesProgram]:
        """Return the cached programs, the newest at the end."""
        return [program for _, program in self._programs]

    def _programs_of(
        self, step: Callable[..., Any], given: list[Any], sizes: list[int], trains: bool
    ) -> list[StagesProgram]:
        """Return the program of each micro-batch, recorded now or taken from the cache.

        Args:
            step: the function to record.
            given: the arguments of each micro-batch.
            sizes: the rows of each micro-batch.
            trains: whether gradients are recorded.

        Raises:
            RuntimeError: ranks would run different programs.
        """
        modules = self.modules()
        state = trains, tuple(m.training for m in modules), autocast.now(), _state(modules)
        state = (*state, _parameters(modules))
        found = []
        for each, rows in zip(given, sizes, strict=True):
            # One key may have several programs, which differ in answers about input values.
            key, inputs = (_shown(each), *state), tensors_in(each)
            known = (p for k, p in self._programs if k == key and fits(p, inputs))
            program = next(known, None)
            if program is None:
                program = self._recorded(step, each, rows, trains)
                self._programs = [*self._programs, (key, program)][-MOST:]
            found.append(program)
        if any(program.reads for program in found):
            self._agree_on_values(found)
        return found

    def _recorded(
        self, step: Callable[..., Any], given: Any, rows: int, trains: bool
    ) -> StagesProgram:
        with torch.set_grad_enabled(trains):
            made = record(
                self.name,
                step,
                *given,
                modules=self.modules(),
                stages=dict(enumerate(self.placements)),
                stage_of=lambda m: None if (s := stage_of(m)) is None else s.index,
                layout_of=lambda stage, shape: self._layout(stage, shape, rows),
                moves=self.moves,
            )
        check_written(made)
        return made

    def _has_losses(self, programs: list[StagesProgram], trains: bool, needed: bool) -> bool:
        """Return whether the programs have a backward to run.

        Args:
            programs: the programs of the micro-batches.
            trains: whether gradients are recorded.
            needed: whether a step without backward is an error.

        Raises:
            RuntimeError: backward was called where no gradients are recorded, or is missing where
                it is needed.
        """
        found = [program for program in programs if program.losses]
        if found and not trains:
            raise RuntimeError(
                f"{self.name}: backward was called where no gradients are recorded.\n"
                "  The step runs under torch.no_grad(), or as one that returns outputs alone.\n"
                "  Call it where gradients are recorded, or leave loss.backward() out."
            )
        if trains and (len(found) < len(programs) and (needed or found)):
            raise RuntimeError(
                f"{self.name}: backward was called on no loss.\n"
                "  A step of stages trains, and begins its backward at a loss.\n"
                "  Call loss.backward() in it, for every micro-batch."
            )
        return bool(found)

    def _layout(self, stage: int, shape: tuple[int, ...], rows: int) -> NdSbp:
        """Return the SBP in which a plain tensor of ``shape`` enters ``stage``.

        A tensor with ``rows`` rows, one for each sample, is S(0) along the axes that split the
        batch. All other tensors are B.
        """
        axes = self.splits[stage] if shape and shape[0] == rows else ()
        return tuple(S(0) if axis in axes else B for axis in range(self.placements[stage].ndim))

    # -- after the schedule ------------------------------------------------------------------------

    def _result(self, given: MicroBatch, found: dict[int, Any]) -> Any:
        """Return what the step returns for one micro-batch.

        ``found`` has the values that stages on this rank computed. Values of other stages are
        global tensors without data here, and plain values are computed by every rank.
        """
        program = given.program
        plain = [i for i in refs(program.result) if program.values[i].stage is None]
        if plain:  # plain results are computed by every rank, also outside the stages
            cell = Cell(program, part_of(program, None), torch.device("cpu"))
            cell.forward(given.inputs, {}, given.draws, None)
            found = {**found, **cell.results}
        return map_each(
            program.result,
            Ref,
            lambda ref: (
                found[ref.index] if ref.index in found else of_spec(program.spec(ref.index))
            ),
        )

    def _follow_gradients(self, programs: list[StagesProgram]) -> None:
        """Give parameters of other stages a gradient without data if their own stage has one.

        So all ranks agree on which parameters have a gradient, and run the same ops on them in an
        optimizer. The layouts are gathered from all ranks once for each set of programs, and then
        cached.
        """
        params: list[Any] = list(
            dict.fromkeys(p for m in self.modules() for p in m.parameters(recurse=False))
        )
        known, key = programs[0].graded, tuple(programs)
        if key not in known:  # the same on every rank, so all of them join the gather
            mine = [p.grad.sbp if _is_graded(p) else None for p in params]
            told = gathered(mine)
            first = [p.placement.first_rank if is_global(p) else current().rank for p in params]
            known[key] = [told[r][k] for k, r in enumerate(first)]
        for p, sbp in zip(params, known[key], strict=True):
            outside = is_global(p) and my_coordinate(p.placement) is None
            if outside and sbp is not None and p.grad is None:
                spec = p._spec.with_sbp(sbp)
                shape = spec.local_shape(None)
                local = torch.empty(shape, dtype=spec.dtype, device="meta")
                set_raw_grad(p, attach(local, spec))

    # -- agreement ---------------------------------------------------------------------------------

    def _agree(self, args: tuple, kwargs: dict[str, Any], count: int) -> None:
        """Raise on every rank if the ranks are about to run batches of different shapes.

        Args:
            args, kwargs: the whole batch.
            count: the number of micro-batches, which must be the same too.

        Raises:
            RuntimeError: the message lists the batch of each rank.
        """
        if current().size == 1:
            return
        tensors = ", ".join(map(_text, tensors_in((args, kwargs))))
        note = (count, _shown((args, kwargs)), tensors, user_line())

        def differ(notes: list[tuple]) -> RuntimeError:
            said = by_rank(
                f"{n} micro-batches of {batch}, at {line}" for n, _, batch, line in notes
            )
            return RuntimeError(
                f"{self.name}: ranks are about to run different batches.\n{said}\n"
                "  Every rank calls the step with tensors of the same shapes, and with the same "
                "number of micro-batches, whichever stages it is in.\n"
                "  Pass the whole batch on every rank."
            )

        agree(note, differ, fits=lambda notes: alike([each[:2] for each in notes]))

    def _agree_on_values(self, programs: list[StagesProgram]) -> None:
        """Raise on every rank if values of the inputs have led the ranks to different programs.

        Raises:
            RuntimeError: an answer that a program depends on differs between ranks.
        """
        mine = [[answer_text(read.found) for read in program.reads] for program in programs]

        def differ(notes: list[list[list[str]]]) -> RuntimeError:
            rank = next(r for r, note in enumerate(notes) if note != notes[0])
            pairs = zip(notes[0], notes[rank], strict=True)
            m, (a, b) = next((m, ab) for m, ab in enumerate(pairs) if ab[0] != ab[1])
            return RuntimeError(
                f"{self.name}: what the step asks of the values of micro-batch {m} decides what it "
                f"does, and rank 0 finds {a}, rank {rank} {b}.\n"
                "  Every rank passes the same batch, whole.\n"
                "  Read it alike on every rank, masks too."
            )

        agree(mine, differ)


def _unlike(programs: list[StagesProgram]) -> list[StagesProgram]:
    """Return the different programs among those of the micro-batches."""
    return list(dict.fromkeys(programs))


def _share(scale: Callable[[Any], Any], share: float) -> Callable[[Any], Any]:
    """Return a function that weights a loss by ``share`` before it is passed to ``scale``.

    ``share`` is the part of the batch's rows that the micro-batch has.
    """
    return lambda loss: scale(loss if share == 1 else loss * share)


def _shown(given: Any) -> str:
    """Return the ``repr`` of arguments, with tensors as their shape and dtype, as a cache key."""
    return repr(map_tensors(given, _text))


def _text(x: Any) -> str:
    text = str(x._spec) if is_global(x) else f"{x.dtype}{list(x.shape)}".removeprefix("torch.")
    return f"{text} that requires grad" if x.requires_grad else text


def _is_graded(p: Any) -> bool:
    """Return whether ``p`` has a gradient from backward; a frozen parameter may keep an old one."""
    return is_global(p) and p.requires_grad and p.grad is not None


def _parameters(modules: list[torch.nn.Module]) -> tuple:
    """Return what a program depends on of the modules' parameters, as a part of its cache key.

    These are ``requires_grad``, dtype and shape of each parameter: moves of gradients between
    stages depend on them.
    """
    params = (p for m in modules for p in m.parameters(recurse=False))
    return tuple((p.requires_grad, p.dtype, p.shape) for p in params)


def _state(modules: list[torch.nn.Module]) -> tuple:
    """Return the plain attributes of modules, as a part of the program's cache key.

    Code between the modules of stages is recorded once, and may branch on ``self.causal`` or the
    like. Counted are numbers, booleans, strings and None, each with its type since 1 equals True.
    Modules inside a stage are called, not recorded, and are left out.
    """
    kinds = (int, float, bool, str, type(None))
    inside = {id(m) for top in modules if stage_of(top) is not None for m in top.modules()}
    return tuple(
        tuple(
            (k, v.__class__, v)
            for k, v in vars(m).items()
            if isinstance(v, kinds) and k != "training"
        )
        for m in modules
        if id(m) not in inside
    )
