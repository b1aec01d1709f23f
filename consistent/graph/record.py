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
from ..spec.nested import map_instances, map_tensors, tensors_in
from ..spec.tracer import Tracer, without_callbacks
from .effects import RefusingDraws, WriteChecker, version, versions, writes_by_name
from .entering import entered
from .kept import ArgumentsSnapshot
from .program import LOCAL_DEVICE, ProgramLine, Question, Ref, StagesProgram
from .reads import (
    MAX_FOLLOWED_ELEMENTS,
    copy_if_mutable,
    decides_shapes,
    is_answer,
    is_followed,
    result_by_values,
    shapes,
    shapes_by_values,
)
from .recorded_values import RecordedValues
from .stand_in_values import StandInValues
from .stand_ins import outside_all_placements, stand_in, swap_parameters
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
        with ExitStack() as stack:
            stack.enter_context(outside_all_placements(why))
            recorder.values.places = stack.enter_context(swap_parameters(modules))
            stack.enter_context(recorder.listening(modules, stage_of))
            with recorder.quiet():
                stand_in_arguments = map_tensors((args, kwargs), recorder.input)
            result = step(*stand_in_arguments[0], **stand_in_arguments[1])
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
        self._effects = WriteChecker(name)
        self._known_values = StandInValues()
        self._transfers = Transfers(
            self.program, self.values, self._effects, stages, layout_of, moves
        )
        # (value, stage, version) -> the global tensor that a plain tensor became in a stage.
        self._entered_tensors: dict[tuple[int, int, int], Any] = {}
        self._used_known_values = False  # the last call needed values that are known
        self._in_module = False  # the last call is one of a stage's module
        self._quiet_depth = 0  # more than 0: calls pass unrecorded
        # The count of random ops, and the grad mode and autocast, when recording began.
        self._draws_at_start = generator.get_state().counter
        self._initial_mode = self._mode()

    # -- interception of calls ---------------------------------------------------------------------

    def listening(
        self, modules: list[torch.nn.Module], stage_of: Callable[[torch.nn.Module], int | None]
    ) -> ExitStack:
        """Start to record calls, and return a context whose end stops it.

        Recorded are calls of torch functions, of the modules of stages, of ``to_global`` and of
        backward.
        """
        stack = ExitStack()
        covered: set[int] = set()
        # A module comes before its submodules, which then belong to its line.
        for module in modules:
            stage = stage_of(module)
            if stage is None or id(module) in covered:
                continue
            covered.update(id(m) for m in module.modules())
            self._intercept_module(stack, module, stage)
        tracer = Tracer(
            handle_backward=self._backward,
            handle_to_global=self._to_global,
            shapes_of=self._shapes_of,
        )
        stack.enter_context(tracer.tracing())
        stack.enter_context(self)
        self._draws_at_start = generator.get_state().counter
        self._initial_mode = self._mode()
        return stack

    @contextmanager
    def quiet(self) -> Iterator[None]:
        """Record nothing inside the block, such as calls that belong to a line already recorded.

        The run of a stage's module is one line, whatever it calls.
        """
        self._quiet_depth += 1
        try:
            yield
        finally:
            self._quiet_depth -= 1

    def _intercept_module(self, stack: ExitStack, module: Any, stage: int) -> None:
        # torch.nn.Module.__call__ prefers this attribute to _call_impl. Setting it on the instance
        # changes neither class nor hooks, and wraps a module that Module.compile has compiled.
        previous = module.__dict__.get("_compiled_call_impl")
        call = previous or module._call_impl

        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if self._quiet_depth:
                return call(*args, **kwargs)
            with self.quiet():
                return self._call_stage_module(module, call, stage, args, kwargs)

        def restore() -> None:
            if previous is None:
                del module.__dict__["_compiled_call_impl"]
            else:
                module.__dict__["_compiled_call_impl"] = previous

        module.__dict__["_compiled_call_impl"] = wrapper
        stack.callback(restore)

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._quiet_depth:
            return func(*args, **kwargs)
        if func is torch.Tensor.backward:
            return self._backward(*args, **{"gradient": None, "r": None, "c": False, **kwargs})
        self.line = user_line()
        arguments = map_instances((args, kwargs), torch.Tensor, self._own_stand_in)
        stage = self.values.latest_stage(arguments)
        name = getattr(func, "__name__", repr(func))
        if stage is not None:
            if writes_by_name(name, arguments[1]):
                self._check_write_target(name, arguments, stage)
            arguments = map_tensors(
                arguments, lambda x: self._transfers.move_if_needed(x, stage, name, self.line)
            )
        return self._run_and_record(name, func, arguments, stage)

    # -- lines -------------------------------------------------------------------------------------

    def _run_and_record(
        self, name: str, func: Any, arguments: tuple, stage: int | None, module: bool = False
    ) -> Any:
        """Run a call and record it as a line, or as a ``Question`` if it only reads tensor values.

        Return its result, with a stand-in for each tensor. If values of the step's inputs decide
        the shapes in the result, a question about these shapes is recorded too.
        """
        draws_before = self.draws()
        values = None if module else self._known_values.arguments(arguments)
        raw_result, writes = self._run_function(name, func, arguments, values, stage, module)
        by_inputs = values is not None and self._known_values.follow(arguments, writes)
        if values is None and writes and stage is None:
            self._known_values.forget()
        with self.quiet():
            values_decide_shapes = (
                by_inputs
                and bool(tensors_in(raw_result))
                and decides_shapes(func, arguments, raw_result)
            )
        out, outs = self._number_results(
            raw_result, arguments, stage, values is not None, by_inputs
        )
        if outs or writes or module or (by_inputs and is_answer(name, out)):
            args, kwargs = self._with_refs(arguments, lambda _: True)
            mode = self._mode()
            line = ProgramLine(name, func, args, kwargs, outs, stage, module)
            line.mode = None if mode == self._initial_mode else mode
            line.draws = draws_before, self.draws() - draws_before
            line.writes, line.where = writes, self.line
            if outs or writes or module:
                self.program.lines.append(line)
            else:
                self._add_question(line, out)
        if self._used_known_values and self._known_values.follow(arguments, writes=False):
            refs = self._with_refs(arguments, lambda x: self._known_values.get(x) is not None)
            self._add_function_question(shapes_by_values, (func, *refs), shapes(*tensors_in(out)))
        if values_decide_shapes:
            self._add_function_question(shapes, tuple(map(Ref, outs)), shapes(*tensors_in(out)))
        return out if values is None else map_instances(out, torch.device, lambda _: _META)

    def _run_function(
        self,
        name: str,
        func: Any,
        arguments: tuple,
        values: tuple | None,
        stage: int | None,
        module: bool,
    ) -> tuple[Any, bool]:
        """Run ``func`` on the known ``values`` of its arguments, or else on ``arguments``.

        The latter are stand-ins. Return its result, and whether it wrote into an argument.
        """
        if values is None and stage is None:  # stand-ins of plain tensors stay on meta
            args, kwargs = map_instances(arguments, torch.device, lambda _: _META)
        else:
            args, kwargs = arguments if values is None else values
        for index in self.values.numbers(arguments):
            # A plain tensor (reader None) lacks what any stage wrote into its global copy.
            reader = None if self.program.values[index].spec is None else stage
            self._effects.check_read(index, reader, name, self.line)
        versions_before, self._used_known_values, self._in_module = (
            versions((args, kwargs)),
            False,
            module,
        )
        refusing_draws = RefusingDraws(self.program.name, name, self.line)
        with self.quiet(), refusing_draws if stage is None else nullcontext():
            out = func(*args, **kwargs)
        self._effects.check_writes(name, self.line)
        writes = writes_by_name(name, arguments[1]) or versions((args, kwargs)) != versions_before
        return out, writes

    def _number_results(
        self, raw_result: Any, arguments: tuple, stage: int | None, is_known: bool, by_inputs: bool
    ) -> tuple[Any, tuple[int, ...]]:
        """Return a call's result with a stand-in for each tensor, and the numbers of these values.

        Args:
            raw_result: the result.
            arguments: the arguments of the call.
            stage: the stage that the call runs in.
            is_known: whether it ran on known values, so that the values of its result are known.
            by_inputs: whether these values follow from the step's inputs.
        """
        inputs = {id(x): self.values.number(x) for x in tensors_in(arguments)}
        outs: list[int] = []

        def number_result(x: torch.Tensor) -> Any:
            x = self._known_values.stand_in_of(x)
            if id(x) in inputs:  # written in place, or returned as it came
                outs.append(inputs[id(x)])
                return x
            tensor = x if x.is_meta or is_global(x) else stand_in(x)
            if (
                is_known
                and tensor is not x
                and not (by_inputs and x.numel() > MAX_FOLLOWED_ELEMENTS)
            ):
                self._known_values.put(tensor, x, by_inputs)
            outs.append(self.values.add(tensor, stage if is_global(tensor) else None))
            return tensor

        return map_tensors(raw_result, number_result), tuple(outs)

    def _with_refs(self, arguments: tuple, is_input: Callable[[torch.Tensor], bool]) -> Any:
        """Return a call's arguments as a program stores them: with a ``Ref`` for each tensor.

        Tensors for which ``is_input`` is False stay as they are.
        """
        with_refs = map_tensors(
            arguments, lambda x: Ref(self.values.number(x)) if is_input(x) else x
        )
        return map_instances(with_refs, torch.device, lambda d: LOCAL_DEVICE if d == _META else d)

    def _add_question(self, line: ProgramLine, answer: Any) -> None:
        self.program.reads.append(Question(line, len(self.program.lines), copy_if_mutable(answer)))

    def _add_function_question(
        self, function: Callable[..., Any], args: tuple, answer: Any
    ) -> None:
        """Record a question: the program is reused only if ``function(*args)`` is ``answer``."""
        self._add_question(ProgramLine(function.__name__, function, args, {}, (), None), answer)

    def _shapes_of(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return the result on ``meta`` of a call whose shapes depend on values; None if unknown.

        It is the callback ``Tracer.shapes_of``, and notes that the call needed values. A module of
        a stage gets None: it runs as it is written for each micro-batch, so a question about the
        values that it read could not be asked again.
        """
        if self._in_module:
            return None
        result = result_by_values(func, (args, kwargs), self._known_values.get)
        self._used_known_values |= result is not None
        return result

    def _call_stage_module(
        self, module: Any, call: Any, stage: int, args: tuple, kwargs: dict
    ) -> Any:
        self.line = user_line()
        name = type(module).__name__
        arguments: Any = map_tensors((args, kwargs), self._own_stand_in)
        latest = self.values.latest_stage(arguments)
        if latest is not None and latest > stage:
            raise ValueError(
                f"{self.program.name}: {name}, called at {self.line}, is in stage {stage} and is "
                f"given what stage {latest} makes.\n  A batch passes stages 0, 1, 2, ... once.\n"
                "  Put the module in that stage or a later one, or cut the model elsewhere."
            )
        arguments = map_tensors(
            arguments, lambda x: self._transfers.move_if_needed(x, stage, name, self.line)
        )
        arguments = map_tensors(
            arguments, lambda x: x if is_global(x) else self._make_global(x, stage)
        )

        snapshot = ArgumentsSnapshot(arguments)
        self._refuse_holder(name, snapshot.holder_of_hidden_tensor(self.values.ids()))

        def run(*args: Any, **kwargs: Any) -> Any:
            out = call(*args, **kwargs)
            self._refuse_holder(name, snapshot.changed_argument())
            return out

        out = self._run_and_record(name, run, arguments, stage, module=True)
        self.program.lines[-1].target = module
        # A plain tensor that the module made, such as a mask, exists on the ranks of its stage
        # only, so it becomes a global tensor of the stage.
        return map_tensors(out, lambda x: x if is_global(x) else self._make_global(x, stage, name))

    def _refuse_holder(self, name: str, holder: Any) -> None:
        if holder is None:
            return
        raise RuntimeError(
            f"{self.program.name}: {name}, called at {self.line}, is given a "
            f"{type(holder).__name__} that keeps tensors.\n  What lies between the modules of "
            "stages is recorded once, so all micro-batches would share the object of the "
            "recording, whose tensors have no values.\n  Pass tensors as arguments and results. A "
            "model of transformers keeps keys and values so: model.config.use_cache = False."
        )

    def _make_global(self, x: torch.Tensor, stage: int, made_by: str = "") -> Any:
        """Record a line that makes the plain tensor ``x`` a global one; return its result.

        ``stage`` is the stage whose module uses it, or has made it. Each rank keeps its part, since
        every rank has the whole tensor. If a module made it (its name is ``made_by``), only the
        ranks of the stage have it.
        """
        source = self.values.number(x)
        self._effects.check_read(source, stage, "a module", self.line)
        noted_values = self._known_values.noted_values(x)
        # With the versions: after a write the tensor enters again, with its new values.
        key = source, stage, version(x) + (0 if noted_values is None else version(noted_values))
        if key not in self._entered_tensors:
            placement = self._stages[stage]
            sbp = self._layout_of(stage, tuple(x.shape))
            spec = TensorSpec.of(placement, sbp, x.shape, x.dtype)
            arguments = ((x,), {"spec": spec} | ({"made_by": made_by} if made_by else {}))
            self._entered_tensors[key] = self._run_and_record("entered", entered, arguments, stage)
            self._effects.note_copy(source, stage, self._entered_tensors[key])
        return self._entered_tensors[key]

    # -- moves -------------------------------------------------------------------------------------

    def _to_global(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        if self._quiet_depth:
            with without_callbacks("handle_to_global"):
                return x.to_global(target.placement, target.sbp, grad_sbp=grad_sbp)
        with self.quiet():
            return self._record_to_global(x, target, grad_sbp)

    def _record_to_global(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        self.line = user_line()
        x = self._own_stand_in(x)
        stage = self.values.stage_of(x)
        assert stage is not None
        if target.placement != x._spec.placement:
            stage = self._transfers.next_on(target, stage, self.line)
            x = self._transfers.move(x, stage, target, self.line)
            if grad_sbp is None:
                return x
        arguments = ((x,), {"sbp": target.sbp, "grad_sbp": grad_sbp})
        return self._run_and_record("to_global", type(x).to_global, arguments, stage)

    # -- backward ----------------------------------------------------------------------------------

    def _backward(self, y: Any, gradient: Any, *_: Any, **__: Any) -> None:
        self.line = user_line()
        with self.quiet():
            y = self._own_stand_in(y)
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
        tensor = stand_in(x)
        stage = self.values.stage_on(x)
        self.program.inputs.append(self.values.add(tensor, stage))
        if stage is None and is_followed(x):  # a copy, as the step may modify it
            self._known_values.put(tensor, x.detach().to("cpu", copy=True), by_inputs=True)
        return tensor

    def ref(self, x: torch.Tensor) -> Any:
        """Return the ``Ref`` for a tensor that the step returns."""
        index = self.values.number(self._own_stand_in(x))
        self._effects.check_read(index, self.program.values[index].stage, "the result", self.line)
        return Ref(index)

    def draws(self) -> int:
        """Return the number of random ops so far, since the recording began."""
        return generator.get_state().counter - self._draws_at_start

    def _own_stand_in(self, x: torch.Tensor) -> Any:
        return self.values.stand_in_for(x, self.line)

    def _check_write_target(self, name: str, arguments: tuple, stage: int) -> None:
        """Raise if a call of ``stage`` modifies a tensor that another stage made.

        Later lines of that stage would read its own tensor, which the write has not changed.
        """
        for x in tensors_in((arguments[0][:1], arguments[1].get("out"))):
            if is_global(x) and (source_stage := self.values.stage_of(x)) != stage:
                raise RuntimeError(
                    f"{self.program.name}: {name} at {self.line} writes into a tensor of stage "
                    f"{source_stage} what stage {stage} has made.\n"
                    "  A stage hands on what it has made when it ends.\n  Write into a copy."
                )

    @staticmethod
    def _mode() -> tuple[bool, tuple]:
        return torch.is_grad_enabled(), autocast.autocast_state()
