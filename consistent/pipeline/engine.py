"""Run a step with pipeline stages on a batch: compare ranks, cut, record, run, join results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrored.every_rank import agree, all_equal, gather_from_ranks, lines_by_rank
from mirrored.transports.default import current
from mirrored.transports.faults.place import user_line

from ..dispatch.planning import autocast
from ..dispatch.plans.gradients import set_raw_grad
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..graph.program import Ref, StagesProgram, refs
from ..graph.reads import answer_text
from ..graph.record import record
from ..graph.stand_ins import stand_in_of_spec
from ..movement.world import my_coordinate
from ..spec import B, NdSbp, Placement, S
from ..spec.nested import map_instances, map_tensors, tensors_in
from .cell import Cell
from .fits import program_fits_inputs
from .micro_batches import join_results, micro_batch_ranges, narrow_batch, rows_of
from .part import check_plain_writes, part_of
from .run import MicroBatch, ScheduleRun, run_schedule
from .schedules import schedule
from .stage import stage_of
from .table import Schedule
from .tied import TiedParameters

MAX_PROGRAMS = 16  # recorded programs that an engine caches; another one drops the oldest


@dataclass
class Engine:
    """Runner of a staged program, with the cache of the programs that it recorded.

    Both ``consistent.nn.pipeline`` and steps that mark their modules with stages use an engine.

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
    tied: TiedParameters = field(default_factory=TiedParameters)
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
        table = schedule(self.schedule, len(lines), len(self.placements), count)
        for stage, placement in enumerate(self.placements):
            if lines[table.line_of[stage]] != placement:
                expected = lines[table.line_of[stage]]
                raise ValueError(
                    f"{self.name}: stage {stage} is on {placement}, and the schedule "
                    f"{self.schedule!r} runs it on {expected}.\n"
                    f"  It runs stages 0, 1, ... on placements {list(table.line_of)} of {lines}.\n"
                    "  Place the stages so, or take another schedule."
                )
        return table

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
        with self.tied.copies_in_modules():
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
        self._check_same_batch(args, kwargs, count)
        ranges = micro_batch_ranges(self.name, rows, count)
        table = self.table(count)
        batch, draws = [], generator.get_state().counter
        micro_arguments = [narrow_batch((args, kwargs), rows, *row_range) for row_range in ranges]
        programs = self._programs_of(
            step, micro_arguments, [n for _, n in ranges], scale is not None
        )
        if not self._has_losses(_distinct(programs), scale is not None, needs_loss):
            scale = None
        for arguments, (_, size), program in zip(micro_arguments, ranges, programs, strict=True):
            loss_scale = None if scale is None else _weighted_scale(scale, size / rows)
            batch.append(MicroBatch(program, tensors_in(arguments), draws, loss_scale))
            draws += program.draws
        run = ScheduleRun(table if scale is not None else table.forwards(), self.placements, batch)
        self.tied.copy_values()
        with torch.set_grad_enabled(scale is not None):
            run_schedule(run)
        # Lines set the count as they run, and ranks run different lines. Set one count on all.
        if draws != generator.get_state().counter:
            generator.set_draw_count(torch.default_generator, draws)
        if scale is not None:
            self._set_outside_gradients(_distinct(programs))
            self.tied.add_gradients()
        results = [
            self._micro_batch_result(arguments, values)
            for arguments, values in zip(batch, run.results)
        ]
        return join_results(self.name, results, [size for _, size in ranges])

    # -- programs ----------------------------------------------------------------------------------

    @property
    def programs(self) -> list[StagesProgram]:
        """Return the cached programs, the newest at the end."""
        return [program for _, program in self._programs]

    def _programs_of(
        self, step: Callable[..., Any], arguments: list[Any], sizes: list[int], trains: bool
    ) -> list[StagesProgram]:
        """Return the program of each micro-batch, recorded now or taken from the cache.

        Args:
            step: the function to record.
            arguments: the arguments of each micro-batch.
            sizes: the rows of each micro-batch.
            trains: whether gradients are recorded.

        Raises:
            RuntimeError: ranks would run different programs.
        """
        modules = self.modules()
        state = (
            trains,
            tuple(m.training for m in modules),
            autocast.autocast_state(),
            _attributes_key(modules),
        )
        state = (*state, _parameters_key(modules))
        programs = []
        for micro_arguments, rows in zip(arguments, sizes, strict=True):
            # One key may have several programs, which differ in answers about input values.
            key, inputs = (_arguments_text(micro_arguments), *state), tensors_in(micro_arguments)
            matching = (p for k, p in self._programs if k == key and program_fits_inputs(p, inputs))
            program = next(matching, None)
            if program is None:
                program = self._record_program(step, micro_arguments, rows, trains)
                self._programs = [*self._programs, (key, program)][-MAX_PROGRAMS:]
            programs.append(program)
        if any(program.reads for program in programs):
            self._check_same_reads(programs)
        return programs

    def _record_program(
        self, step: Callable[..., Any], arguments: Any, rows: int, trains: bool
    ) -> StagesProgram:
        with torch.set_grad_enabled(trains):
            program = record(
                self.name,
                step,
                *arguments,
                modules=self.modules(),
                stages=dict(enumerate(self.placements)),
                stage_of=lambda m: None if (s := stage_of(m)) is None else s.index,
                layout_of=lambda stage, shape: self._entry_sbp(stage, shape, rows),
                moves=self.moves,
            )
        check_plain_writes(program)
        return program

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
        with_losses = [program for program in programs if program.losses]
        if with_losses and not trains:
            raise RuntimeError(
                f"{self.name}: backward was called where no gradients are recorded.\n"
                "  The step runs under torch.no_grad(), or as one that returns outputs alone.\n"
                "  Call it where gradients are recorded, or leave loss.backward() out."
            )
        if trains and (len(with_losses) < len(programs) and (needed or with_losses)):
            raise RuntimeError(
                f"{self.name}: backward was called on no loss.\n"
                "  A step of stages trains, and begins its backward at a loss.\n"
                "  Call loss.backward() in it, for every micro-batch."
            )
        return bool(with_losses)

    def _entry_sbp(self, stage: int, shape: tuple[int, ...], rows: int) -> NdSbp:
        """Return the SBP in which a plain tensor of ``shape`` enters ``stage``.

        A tensor with ``rows`` rows, one for each sample, is S(0) along the axes that split the
        batch. All other tensors are B.
        """
        axes = self.splits[stage] if shape and shape[0] == rows else ()
        return tuple(S(0) if axis in axes else B for axis in range(self.placements[stage].ndim))

    # -- after the schedule ------------------------------------------------------------------------

    def _micro_batch_result(self, micro_batch: MicroBatch, values: dict[int, Any]) -> Any:
        """Return what the step returns for one micro-batch.

        ``values`` has those that stages on this rank computed. Values of other stages are
        global tensors without data here, and plain values are computed by every rank.
        """
        program = micro_batch.program
        plain = [i for i in refs(program.result) if program.values[i].stage is None]
        if plain:  # plain results are computed by every rank, also outside the stages
            cell = Cell(program, part_of(program, None), torch.device("cpu"))
            cell.forward(micro_batch.inputs, {}, micro_batch.draws, None)
            values = {**values, **cell.results}
        return map_instances(
            program.result,
            Ref,
            lambda ref: (
                values[ref.index]
                if ref.index in values
                else stand_in_of_spec(program.spec(ref.index))
            ),
        )

    def _set_outside_gradients(self, programs: list[StagesProgram]) -> None:
        """Give parameters of other stages a gradient without data if their own stage has one.

        So all ranks agree on which parameters have a gradient, and run the same ops on them in an
        optimizer. The layouts are gathered from all ranks once for each set of programs, and then
        cached.
        """
        params: list[Any] = list(
            dict.fromkeys(p for m in self.modules() for p in m.parameters(recurse=False))
        )
        cache, key = programs[0].grad_sbps, tuple(programs)
        if key not in cache:  # the same on every rank, so all of them join the gather
            own_sbps = [p.grad.sbp if _has_gradient(p) else None for p in params]
            rank_sbps = gather_from_ranks(own_sbps)
            owner_ranks = [
                p.placement.first_rank if is_global(p) else current().rank for p in params
            ]
            cache[key] = [rank_sbps[r][k] for k, r in enumerate(owner_ranks)]
        for p, sbp in zip(params, cache[key], strict=True):
            outside = is_global(p) and my_coordinate(p.placement) is None
            if outside and sbp is not None and p.grad is None:
                spec = p._spec.with_sbp(sbp)
                shape = spec.local_shape(None)
                local = torch.empty(shape, dtype=spec.dtype, device="meta")
                set_raw_grad(p, attach(local, spec))

    # -- agreement ---------------------------------------------------------------------------------

    def _check_same_batch(self, args: tuple, kwargs: dict[str, Any], count: int) -> None:
        """Raise on every rank if the ranks are about to run batches of different shapes.

        Args:
            args, kwargs: the whole batch.
            count: the number of micro-batches, which must be the same too.

        Raises:
            RuntimeError: the message lists the batch of each rank.
        """
        if current().size == 1:
            return
        tensors = ", ".join(map(_tensor_text, tensors_in((args, kwargs))))
        note = (count, _arguments_text((args, kwargs)), tensors, user_line())

        def mismatch_error(notes: list[tuple]) -> RuntimeError:
            batches = lines_by_rank(
                f"{n} micro-batches of {batch}, at {line}" for n, _, batch, line in notes
            )
            return RuntimeError(
                f"{self.name}: ranks are about to run different batches.\n{batches}\n"
                "  Every rank calls the step with tensors of the same shapes, and with the same "
                "number of micro-batches, whichever stages it is in.\n"
                "  Pass the whole batch on every rank."
            )

        agree(
            note,
            mismatch_error,
            fits=lambda notes: all_equal([rank_note[:2] for rank_note in notes]),
        )

    def _check_same_reads(self, programs: list[StagesProgram]) -> None:
        """Raise on every rank if values of the inputs have led the ranks to different programs.

        Raises:
            RuntimeError: an answer that a program depends on differs between ranks.
        """
        answers = [[answer_text(read.answer) for read in program.reads] for program in programs]

        def mismatch_error(notes: list[list[list[str]]]) -> RuntimeError:
            rank = next(r for r, note in enumerate(notes) if note != notes[0])
            pairs = zip(notes[0], notes[rank], strict=True)
            m, (a, b) = next((m, ab) for m, ab in enumerate(pairs) if ab[0] != ab[1])
            return RuntimeError(
                f"{self.name}: what the step asks of the values of micro-batch {m} decides what it "
                f"does, and rank 0 finds {a}, rank {rank} {b}.\n"
                "  Every rank passes the same batch, whole.\n"
                "  Read it alike on every rank, masks too."
            )

        agree(answers, mismatch_error)


def _distinct(programs: list[StagesProgram]) -> list[StagesProgram]:
    """Return the different programs among those of the micro-batches."""
    return list(dict.fromkeys(programs))


def _weighted_scale(scale: Callable[[Any], Any], share: float) -> Callable[[Any], Any]:
    """Return a function that weights a loss by ``share`` before it is passed to ``scale``.

    ``share`` is the part of the batch's rows that the micro-batch has.
    """
    return lambda loss: scale(loss if share == 1 else loss * share)


def _arguments_text(arguments: Any) -> str:
    """Return the ``repr`` of arguments, with tensors as their shape and dtype, as a cache key."""
    return repr(map_tensors(arguments, _tensor_text))


def _tensor_text(x: Any) -> str:
    text = str(x._spec) if is_global(x) else f"{x.dtype}{list(x.shape)}".removeprefix("torch.")
    return f"{text} that requires grad" if x.requires_grad else text


def _has_gradient(p: Any) -> bool:
    """Return whether ``p`` has a gradient from backward; a frozen parameter may keep an old one."""
    return is_global(p) and p.requires_grad and p.grad is not None


def _parameters_key(modules: list[torch.nn.Module]) -> tuple:
    """Return what a program depends on of the modules' parameters, as a part of its cache key.

    These are ``requires_grad``, dtype and shape of each parameter: moves of gradients between
    stages depend on them.
    """
    params = (p for m in modules for p in m.parameters(recurse=False))
    return tuple((p.requires_grad, p.dtype, p.shape) for p in params)


def _attributes_key(modules: list[torch.nn.Module]) -> tuple:
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
