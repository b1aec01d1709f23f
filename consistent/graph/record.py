"""Recording of programs: a step runs once on tensors without values, and its calls are noted.

The recording rank acts as a rank outside all placements, so it knows every layout, communicates
nothing and computes nothing. Code that reads a value, and so would decide by data, raises an error
that names the line.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from mirrored.transports.faults.place import user_line

from ..dispatch.planning import autocast
from ..dispatch.plans.shards import is_global
from ..forms.random import generator
from ..spec import Placement, SbpLike, TensorSpec
from ..spec.nested import map_each, map_tensors, tensors_in
from ..spec.tracer import Tracer, set_aside
from .effects import RefusingDraws, Writes, version, versions, writes_by_name
from .entering import entered
from .kept import ArgumentsSnapshot
from .program import HERE, ProgramLine, Question, Ref, StagesProgram
from .reads import (
    KNOWN,
    as_it_is,
    decides_shapes,
    is_answer,
    is_followed,
    result_by_values,
    shapes,
    shapes_by_values,
)
from .recorded_values import RecordedValues
from .stand_in_values import StandInValues
from .stand_ins import outside, stand_in, swapped
from .transfers import LayoutOf, Transfers

_META = torch.device("meta")


def record(
    name: str,
    step: Callable[..., Any],
    args: tuple,
    kwargs: dict[str, Any],
    *,
    modules: Iterable[torch.nn.Module],
    stages: Mapping[int, Placement],
    stage_of: Callable[[torch.nn.Module], int | None],
    layout_of: LayoutOf,
    moves: bool,
) -> StagesProgram:
    """Return the program of ``step(*args, **kwargs)``, recorded without computing or communicating.

    Args:
        name: the name in error messages.
        step: the function to record.
        args, kwargs: its arguments, of which only shapes and known integer values are used.
        modules: all modules that the step calls.
        stages: stage number -> placement.
        stage_of: returns the stage that a module is part of; a call of such a module is one line.
        layout_of: (stage, logical shape) -> the SBP in which a tensor enters the stage if no line
            states a layout for it.
        moves: whether a tensor of an earlier stage is moved to where it is used. If False, only
            ``to_global(placement=...)`` moves tensors.

    Raises:
        RuntimeError: the step reads a value.
        ValueError: a stage uses what a later one makes, or a tensor is on a placement of no stage.
    """
    recorder = _Recorder(name, stages, layout_of, moves)
    modules = list(modules)
    why = "here a value is needed, and a program of stages is recorded without values"
    try:
        with ExitStack() as inside:
            inside.enter_context(outside(why))
            recorder.values.places = inside.enter_context(swapped(modules))
            inside.enter_context(recorder.listening(modules, stage_of))
            with recorder.quiet():
                taken = map_tensors((args, kwargs), recorder.input)
            result = step(*taken[0], **taken[1])
            with recorder.quiet():
                recorder.program.result = map_tensors(result, recorder.ref)
            recorder.program.draws = recorder.draws()
    except Exception as error:
        error.add_note(f"  while {name} was recorded, at {recorder.line or 'its first line'}")
        raise
    return recorder.program


class _Recorder(TorchFunctionMode):
    """Torch-function mode that notes the calls of a step as lines of a ``StagesProgram``."""

    def __init__(
        self, name: str, stages: Mapping[int, Placement], layout_of: LayoutOf, moves: bool
    ) -> None:
        super().__init__()
        self.program = StagesProgram(name)
        self.values = RecordedValues(self.program, stages)
        self.line = ""
        self._stages, self._layout_of = stages, layout_of
        self._effects = Writes(name)
        self._known = StandInValues()
        self._transfers = Transfers(
            self.program, self.values, self._effects, stages, layout_of, moves
        )
        # (value, stage, version) -> the global tensor that a plain tensor became in a stage.
        self._entered: dict[tuple[int, int, int], Any] = {}
        self._by_values = False  # the last call needed values that are known
        self._in_module = False  # the last call is one of a stage's module
        self._passing = 0  # more than 0: calls pass unrecorded
        # The count of random ops, and the grad mode and autocast, when recording began.
        self._drawn = generator.get_state().counter
        self._around = self._mode()

    # -- interception of calls ---------------------------------------------------------------------

    def listening(
        self, modules: list[torch.nn.Module], stage_of: Callable[[torch.nn.Module], int | None]
    ) -> ExitStack:
        """Start to record calls, and return a context whose end stops it.

        Recorded are calls of torch functions, of the modules of stages, of ``to_global`` and of
        backward.
        """
        stack = ExitStack()
        outer: set[int] = set()
        # A module comes before its submodules, which then belong to its line.
        for module in modules:
            stage = stage_of(module)
            if stage is None or id(module) in outer:
                continue
            outer.update(id(m) for m in module.modules())
            self._listen_to(stack, module, stage)
        tracer = Tracer(
            handle_backward=self._backward,
            handle_to_global=self._to_global,
            shapes_of=self._shapes_of,
        )
        stack.enter_context(tracer.tracing())
        stack.enter_context(self)
        self._drawn = generator.get_state().counter
        self._around = self._mode()
        return stack

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing inside the block, such as calls that belong to a line already recorded.

        The run of a stage's module is one line, whatever it calls.
        """
        self._passing += 1
        try:
            yield
        finally:
            self._passing -= 1

    def _listen_to(self, stack: ExitStack, module: Any, stage: int) -> None:
        # torch.nn.Module.__call__ prefers this attribute to _call_impl. Setting it on the instance
        # leaves class and hooks alone, and wraps a module that Module.compile has compiled.
        before = module.__dict__.get("_compiled_call_impl")
        call = before or module._call_impl

        def called(*args: Any, **kwargs: Any) -> Any:
            if self._passing:
                return call(*args, **kwargs)
            with self.quiet():
                return self._module(module, call, stage, args, kwargs)

        def restore() -> None:
            if before is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = before

        module.__dict__["_compiled_call_impl"] = called
        stack.callback(restore)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._passing:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(*args, **{"gradient": None, "r": None, "c": False, **kwargs})
        self.line = user_line()
        given = map_each((args, kwargs), torch.Tensor, self._own)
        stage = self.values.latest(given)
        name = getattr(func, "__name__", repr(func))
        if stage is not None:
            if writes_by_name(name, given[1]):
                self._check_target(name, given, stage)
            given = map_tensors(given, lambda x: self._transfers.at(x, stage, name, self.line))
        return self._run(name, func, given, stage)

    # -- lines -------------------------------------------------------------------------------------

    def _run(
        self, name: str, func: Any, given: tuple, stage: int | None, module: bool = False
    ) -> Any:
        """Run a call and record it as a line, or as a ``Question`` if it only reads tensor values.

        Return its result, with a stand-in for each tensor. If values of the step's inputs decide
        the shapes in the result, a question about these shapes is recorded too.
        """
        before = self.draws()
        values = None if module else self._known.arguments(given)
        found, writes = self._call(name, func, given, values, stage, module)
        by_inputs = values is not None and self._known.follow(given, writes)
        if values is None and writes and stage is None:
            self._known.forget()
        with self.quiet():
            sized = by_inputs and bool(tensors_in(found)) and decides_shapes(func, given, found)
        out, outs = self._results(found, given, stage, values is not None, by_inputs)
        if outs or writes or module or (by_inputs and is_answer(name, out)):
            args, kwargs = self._noted(given, lambda _: True)
            mode = self._mode()
            line = ProgramLine(name, func, args, kwargs, outs, stage, module)
            line.mode = None if mode == self._around else mode
            line.draws = before, self.draws() - before
            line.writes, line.where = writes, self.line
            if outs or writes or module:
                self.program.lines.append(line)
            else:
                self._read(line, out)
        if self._by_values and self._known.follow(given, writes=False):
            known = self._noted(given, lambda x: self._known.get(x) is not None)
            self._ask(shapes_by_values, (func, *known), shapes(*tensors_in(out)))
        if sized:
            self._ask(shapes, tuple(map(Ref, outs)), shapes(*tensors_in(out)))
        return out if values is None else map_each(out, torch.device, lambda _: _META)

    def _call(
        self,
        name: str,
        func: Any,
        given: tuple,
        values: tuple | None,
        stage: int | None,
        module: bool,
    ) -> tuple[Any, bool]:
        """Run ``func`` on the known ``values`` of its arguments, or else on ``given``, stand-ins.

        Return its result, and whether it wrote into an argument.
        """
        if values is None and stage is None:  # stand-ins of plain tensors stay on meta
            args, kwargs = map_each(given, torch.device, lambda _: _META)
        else:
            args, kwargs = given if values is None else values
        for index in self.values.numbers(given):
            # A plain tensor (reader None) lacks what any stage wrote into its global copy.
            reader = None if self.program.values[index].spec is None else stage
            self._effects.check_read(index, reader, name, self.line)
        had, self._by_values, self._in_module = versions((args, kwargs)), False, module
        drawing = RefusingDraws(self.program.name, name, self.line)
        with self.quiet(), drawing if stage is None else nullcontext():
            out = func(*args, **kwargs)
        self._effects.look(name, self.line)
        writes = writes_by_name(name, given[1]) or versions((args, kwargs)) != had
        return out, writes

    def _results(
        self, found: Any, given: tuple, stage: int | None, is_known: bool, by_inputs: bool
    ) -> tuple[Any, tuple[int, ...]]:
        """Return a call's result with a stand-in for each tensor, and the numbers of these values.

        Args:
            found: the result.
            given: the arguments of the call.
            stage: the stage that the call runs in.
            is_known: whether it ran on known values, so that the values of its result are known.
            by_inputs: whether these values follow from the step's inputs.
        """
        inputs = {id(x): self.values.number(x) for x in tensors_in(given)}
        outs: list[int] = []

        def result(x: torch.Tensor) -> Any:
            x = self._known.stand_in_of(x)
            if id(x) in inputs:  # written in place, or returned as it came
                outs.append(inputs[id(x)])
                return x
            made = x if x.is_meta or is_global(x) else stand_in(x)
            if is_known and made is not x and not (by_inputs and x.numel() > KNOWN):
                self._known.put(made, x, by_inputs)
            outs.append(self.values.add(made, stage if is_global(made) else None))
            return made

        return map_tensors(found, result), tuple(outs)

    def _noted(self, given: tuple, is_input: Callable[[torch.Tensor], bool]) -> Any:
        """Return a call's arguments as a program stores them: with a ``Ref`` for each tensor.

        Tensors for which ``is_input`` is False stay as they are.
        """
        noted = map_tensors(given, lambda x: Ref(self.values.number(x)) if is_input(x) else x)
        return map_each(noted, torch.device, lambda d: HERE if d == _META else d)

    def _read(self, line: ProgramLine, found: Any) -> None:
        self.program.reads.append(Question(line, len(self.program.lines), as_it_is(found)))

    def _ask(self, function: Callable[..., Any], args: tuple, found: Any) -> None:
        """Record a question: the program is used again only if ``function(*args)`` is ``found``."""
        self._read(ProgramLine(function.__name__, function, args, {}, (), None), found)

    def _shapes_of(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result on ``meta`` of a call whose shapes depend on values; None if unknown.

        It is the callback ``Tracer.shapes_of``, and notes that the call needed values. A module of
        a stage gets None: it runs as it is written for each micro-batch, so a question about the
        values that it read could not be asked again.
        """
        if self._in_module:
            return None
        found = result_by_values(func, (args, kwargs), self._known.get)
        self._by_values |= found is not None
        return found

    def _module(self, module: Any, call: Any, stage: int, args: tuple, kwargs: dict) -> Any:
        self.line = user_line()
        name = type(module).__name__
        given: Any = map_tensors((args, kwargs), self._own)
        latest = self.values.latest(given)
        if latest is not None and latest > stage:
            raise ValueError(
                f"{self.program.name}: {name}, called at {self.line}, is in stage {stage} and is "
                f"given what stage {latest} makes.\n  A batch passes stages 0, 1, 2, ... once.\n"
                "  Put the module in that stage or a later one, or cut the model elsewhere."
            )
        given = map_tensors(given, lambda x: self._transfers.at(x, stage, name, self.line))
        given = map_tensors(given, lambda x: x if is_global(x) else self._enter(x, stage))

        kept = ArgumentsSnapshot(given)
        self._refuse_kept(name, kept.hidden(self.values.ids()))

        def run(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            self._refuse_kept(name, kept.changed())
            return out

        out = self._run(name, run, given, stage, module=True)
        self.program.lines[-1].target = module
        # A plain tensor that the module made, such as a mask, exists on the ranks of its stage
        # only, so it becomes a global tensor of the stage.
        return map_tensors(out, lambda x: x if is_global(x) else self._enter(x, stage, name))

    def _refuse_kept(self, name: str, holder: Any) -> None:
        if holder is None:
            return
        raise RuntimeError(
            f"{self.program.name}: {name}, called at {self.line}, is given a "
            f"{type(holder).__name__} that keeps tensors.\n  What lies between the modules of "
            "stages is recorded once, so all micro-batches would share the object of the "
            "recording, whose tensors have no values.\n  Pass tensors as arguments and results. A "
            "model of transformers keeps keys and values so: model.config.use_cache = False."
        )

    def _enter(self, x: torch.Tensor, stage: int, made_by: str = "") -> Any:
        """Record a line that makes the plain tensor ``x`` a global one; return its result.

        ``stage`` is the stage whose module uses it, or has made it. Each rank keeps its part, since
        every rank has the whole tensor. If a module made it (its name is ``made_by``), only the
        ranks of the stage have it.
        """
        source = self.values.number(x)
        self._effects.check_read(source, stage, "a module", self.line)
        known = self._known.noted(x)
        # With the versions: after a write the tensor enters again, with its new values.
        key = source, stage, version(x) + (0 if known is None else version(known))
        if key not in self._entered:
            placement = self._stages[stage]
            sbp = self._layout_of(stage, tuple(x.shape))
            spec = TensorSpec.of(placement, sbp, x.shape, x.dtype)
            given = ((x,), {"spec": spec} | ({"made_by": made_by} if made_by else {}))
            self._entered[key] = self._run("entered", entered, given, stage)
            self._effects.copied(source, stage, self._entered[key])
        return self._entered[key]

    # -- moves -------------------------------------------------------------------------------------

    def _to_global(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        if self._passing:
            with set_aside("handle_to_global"):
                return x.to_global(target.placement, target.sbp, grad_sbp=grad_sbp)
        with self.quiet():
            return self._moved_to(x, target, grad_sbp)

    def _moved_to(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        self.line = user_line()
        x = self._own(x)
        stage = self.values.stage_of(x)
        assert stage is not None
        if target.placement != x._spec.placement:
            stage = self._transfers.next_on(target, stage, self.line)
            x = self._transfers.move(x, stage, target, self.line)
            if grad_sbp is None:
                return x
        given = ((x,), {"sbp": target.sbp, "grad_sbp": grad_sbp})
        return self._run("to_global", type(x).to_global, given, stage)

    # -- backward ----------------------------------------------------------------------------------

    def _backward(self, y: Any, gradient: Any, *_: Any, **__: Any) -> None:
        self.line = user_line()
        with self.quiet():
            y = self._own(y)
        if gradient is not None or y.ndim:
            raise RuntimeError(
                f"{self.program.name}: backward of a tensor of shape {tuple(y.shape)} at "
                f"{user_line()}.\n  A step of stages begins its backward at a loss without dims.\n"
                "  Reduce it first: (y * gradient).sum().backward()."
            )
        self.program.losses.append(self.values.number(y))

    # -- values ------------------------------------------------------------------------------------

    def input(self, x: torch.Tensor) -> Any:
        """Return a stand-in for a tensor among the step's arguments, and note it as an input.

        Values of integers and bools are kept, to answer questions.
        """
        made = stand_in(x)
        stage = self.values.stage_on(x)
        self.program.inputs.append(self.values.add(made, stage))
        if stage is None and is_followed(x):  # a copy, as the step may write into it
            self._known.put(made, x.detach().to("cpu", copy=True), by_inputs=True)
        return made

    def ref(self, x: torch.Tensor) -> Any:
        """Return the ``Ref`` for a tensor that the step returns."""
        index = self.values.number(self._own(x))
        self._effects.check_read(index, self.program.values[index].stage, "the result", self.line)
        return Ref(index)

    def draws(self) -> int:
        """Return the number of random ops so far, since the recording began."""
        return generator.get_state().counter - self._drawn

    def _own(self, x: torch.Tensor) -> Any:
        return self.values.own(x, self.line)

    def _check_target(self, name: str, given: tuple, stage: int) -> None:
        """Raise if a call of ``stage`` writes into a tensor that another stage made.

        Later lines of that stage would read its own tensor, which the write has not changed.
        """
        for x in tensors_in((given[0][:1], given[1].get("out"))):
            if is_global(x) and (made := self.values.stage_of(x)) != stage:
                raise RuntimeError(
                    f"{self.program.name}: {name} at {self.line} writes into a tensor of stage "
                    f"{made} what stage {stage} has made.\n"
                    "  A stage hands on what it has made when it ends.\n  Write into a copy."
                )

    @staticmethod
    def _mode() -> tuple[bool, tuple]:
        return torch.is_grad_enabled(), autocast.now()
