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
from ..dispatch.plans.shards import attach, is_global
from ..forms.random import generator
from ..movement import plain_values
from ..movement.differentiable import spread
from ..movement.world import device_of, my_coordinate
from ..spec import NdSbp, Placement, SbpLike, TensorSpec
from ..spec.nested import map_each, map_tensors, tensors_in
from ..spec.tracer import Tracer, set_aside
from .effects import RefusingDraws, Writes, version, versions, writes_by_name
from .kept import ArgumentsSnapshot
from .program import HERE, ProgramLine, ProgramValue, Question, Ref, StagesProgram, StageTransfer
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
from .stand_ins import of_spec, outside, stand_in, swapped

LayoutOf = Callable[[int, tuple[int, ...]], NdSbp]
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
            recorder.places = inside.enter_context(swapped(modules))
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
    """Torch-function mode that notes the calls of a step as lines of a ``StagesProgram``.

    Tensors of the step are stand-ins (without values). They are kept alive, because the number of a
    value is found by the id of its stand-in.
    """

    def __init__(
        self, name: str, stages: Mapping[int, Placement], layout_of: LayoutOf, moves: bool
    ) -> None:
        super().__init__()
        self.program = StagesProgram(name)
        self.places: dict[int, Any] = {}
        self.line = ""
        self._stages, self._layout_of, self._moves = stages, layout_of, moves
        self._known: dict[int, int] = {}  # id of a stand-in -> number of its value
        self._alive: list[Any] = []
        self._moved: dict[tuple[int, int, Any], Any] = {}
        self._entered: dict[tuple[int, int, int], Any] = {}
        self._effects = Writes(name)
        # Plain tensors with known values, which follow from sizes or from integer inputs: id of a
        # stand-in -> its values, and id of these -> the stand-in.
        self._constants: dict[int, torch.Tensor] = {}
        self._stand_ins: dict[int, Any] = {}
        self._by_inputs: set[int] = set()  # ids of stand-ins whose values follow from inputs
        self._lost: set[int] = set()  # ids of stand-ins whose values may have been overwritten
        self._by_values = False  # the last call needed values that are known
        self._in_module = False  # the last call is one of a stage's module
        self._passing = 0  # more than 0: calls pass unrecorded
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
        stage = self._latest(given)
        name = getattr(func, "__name__", repr(func))
        if stage is not None:
            if writes_by_name(name, given[1]):
                self._check_target(name, given, stage)
            given = map_tensors(given, lambda x: self._at(x, stage, name))
        return self._run(name, func, given, stage)

    # -- lines -------------------------------------------------------------------------------------

    def _run(
        self, name: str, func: Any, given: tuple, stage: int | None, module: bool = False
    ) -> Any:
        before, writes = self.draws(), writes_by_name(name, given[1])
        values = None if module else self._values_of(given)
        if values is None and stage is None:  # stand-ins of plain tensors stay on meta
            args, kwargs = map_each(given, torch.device, lambda _: _META)
        else:
            args, kwargs = given if values is None else values
        for index in self._indices(given):
            # A plain tensor (reader None) lacks what any stage wrote into its global copy.
            reader = None if self.program.values[index].spec is None else stage
            self._effects.check_read(index, reader, name, self.line)
        had, self._by_values, self._in_module = versions((args, kwargs)), False, module
        drawing = RefusingDraws(self.program.name, name, self.line)
        with self.quiet(), drawing if stage is None else nullcontext():
            out = func(*args, **kwargs)
        writes = writes or versions((args, kwargs)) != had
        self._effects.look(name, self.line)
        by_inputs = values is not None and self._follow(given, writes)
        if values is None and writes and stage is None:
            # All known values, as any of them may be a view of what was written.
            self._lost |= set(self._constants)
        inputs = {id(x): self._known[id(x)] for x in tensors_in(given)}
        outs: list[int] = []
        with self.quiet():
            sized = by_inputs and bool(tensors_in(out)) and decides_shapes(func, given, out)

        def result(x: torch.Tensor) -> Any:
            x = self._stand_ins.get(id(x), x)
            if id(x) in inputs:  # written in place, or returned as it came
                outs.append(inputs[id(x)])
                return x
            made = x if x.is_meta or is_global(x) else stand_in(x)
            if values is not None and made is not x and not (by_inputs and x.numel() > KNOWN):
                self._knows(made, x, by_inputs)
            outs.append(self._value(made, stage if is_global(made) else None))
            return made

        out = map_tensors(out, result)
        if outs or writes or module or (by_inputs and is_answer(name, out)):
            noted = self._noted(given, lambda _: True)
            mode = self._mode()
            line = ProgramLine(name, func, noted[0], noted[1], tuple(outs), stage, module)
            line.mode = None if mode == self._around else mode
            line.draws = before, self.draws() - before
            line.writes, line.where = writes, self.line
            if outs or writes or module:
                self.program.lines.append(line)
            else:
                self._read(line, out)
        if self._by_values and self._follow(given, writes=False):
            known = self._noted(given, lambda x: self._value_of(x) is not None)
            self._ask(shapes_by_values, (func, *known), shapes(*tensors_in(out)))
        if sized:
            self._ask(shapes, tuple(map(Ref, outs)), shapes(*tensors_in(out)))
        return out if values is None else map_each(out, torch.device, lambda _: _META)

    def _noted(self, given: tuple, is_input: Callable[[torch.Tensor], bool]) -> Any:
        """Return a call's arguments as a program keeps them, with a ``Ref`` for each tensor that it
        finds again; the others are kept as they are."""
        noted = map_tensors(given, lambda x: Ref(self._known[id(x)]) if is_input(x) else x)
        return map_each(noted, torch.device, lambda d: HERE if d == _META else d)

    def _read(self, line: ProgramLine, found: Any) -> None:
        self.program.reads.append(Question(line, len(self.program.lines), as_it_is(found)))

    def _ask(self, function: Callable[..., Any], args: tuple, found: Any) -> None:
        """Note that the program holds only where ``function(*args)`` returns ``found``."""
        self._read(ProgramLine(function.__name__, function, args, {}, (), None), found)

    def _follow(self, given: tuple, writes: bool) -> bool:
        """Return whether the result of a call on ``given`` follows from the step's inputs.

        If such a call writes, all known values count as following from inputs from then on, since
        any of them may be a view of what was written.
        """
        found = any(id(x) in self._by_inputs for x in tensors_in(given))
        if found and writes:
            self._by_inputs |= set(self._constants)
        return found

    def _knows(self, made: Any, x: torch.Tensor, by_inputs: bool) -> None:
        """Remember ``x`` as the values of the stand-in ``made``, to answer questions about them."""
        self._constants[id(made)] = x
        self._stand_ins[id(x)] = made
        if by_inputs:
            self._by_inputs.add(id(made))

    def _values_of(self, given: tuple) -> tuple | None:
        """Return a call's arguments with values in place of stand-ins; None if one is not known.

        With them the call is run, because its results may decide what the program does, as
        ``mask.all()``.
        """
        if any(self._value_of(x) is None for x in tensors_in(given)):
            return None
        made = map_tensors(given, lambda x: self._constants[id(x)])
        return map_each(made, torch.device, lambda d: torch.device("cpu") if d == _META else d)

    def _shapes_of(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Return what ``Tracer.shapes_of`` does, and note that the call needed values.

        Modules of stages run as they are written for each micro-batch, so no question about the
        values that they read could be asked again. They get no answer.
        """
        if self._in_module:
            return None
        found = result_by_values(func, (args, kwargs), self._value_of)
        self._by_values |= found is not None
        return found

    def _value_of(self, x: torch.Tensor) -> torch.Tensor | None:
        return None if id(x) in self._lost else self._constants.get(id(x))

    def _module(self, module: Any, call: Any, stage: int, args: tuple, kwargs: dict) -> Any:
        self.line = user_line()
        name = type(module).__name__
        given: Any = map_tensors((args, kwargs), self._own)
        latest = self._latest(given)
        if latest is not None and latest > stage:
            raise ValueError(
                f"{self.program.name}: {name}, called at {self.line}, is in stage {stage} and is "
                f"given what stage {latest} makes.\n  A batch passes stages 0, 1, 2, ... once.\n"
                "  Put the module in that stage or a later one, or cut the model elsewhere."
            )
        given = map_tensors(given, lambda x: self._at(x, stage, name))
        given = map_tensors(given, lambda x: x if is_global(x) else self._enter(x, stage))

        kept = ArgumentsSnapshot(given)
        self._refuse_kept(name, kept.hidden(self._known))

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
        source = self._known[id(x)]
        self._effects.check_read(source, stage, "a module", self.line)
        known = self._constants.get(id(x))
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

    def _at(self, x: torch.Tensor, stage: int, what: str) -> Any:
        """Return ``x`` for use in ``stage``: a global tensor of another stage is moved there.

        ``what`` is the call that uses it, for errors.
        """
        if not is_global(x):
            return x
        value = self.program.values[self._known[id(x)]]
        spec: TensorSpec = x._spec  # type: ignore[attr-defined]
        placement = self._stages[stage]
        if value.stage == stage:
            return x
        if spec.placement == placement:
            return self._move(x, stage, spec)
        if not self._moves:
            raise RuntimeError(
                f"{what}, at {self.line}: one of its tensors is {spec}, and stage {stage} is on "
                f"{placement}.\n  Data moves between placements where the program says so.\n"
                "  Move it first: x.to_global(placement=...)."
            )
        target = TensorSpec.of(
            placement, self._layout_of(stage, spec.shape), spec.shape, spec.dtype
        )
        return self._move(x, stage, target)

    def _move(self, x: Any, stage: int, target: TensorSpec) -> Any:
        source = self._known[id(x)]
        self._effects.check_read(source, stage, "what is moved", self.line)
        key = source, stage, target
        if key not in self._moved:
            made = of_spec(target, x.requires_grad)
            index = self._value(made, stage)
            src = self.program.values[source].stage
            assert src is not None
            number = len(self.program.moves)
            self.program.moves.append(StageTransfer(number, source, index, src, stage, self.line))
            self._effects.sent(x, self.program.moves[-1])
            # A view, because torch refuses writes in place into a leaf that requires grad.
            self._moved[key] = made.view_as(made) if made.requires_grad else made
            self._known[id(self._moved[key])] = index
            self._alive.append(self._moved[key])
            self._effects.copied(source, stage, self._moved[key])
        return self._moved[key]

    def _to_global(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        if self._passing:
            with set_aside("handle_to_global"):
                return x.to_global(target.placement, target.sbp, grad_sbp=grad_sbp)
        with self.quiet():
            return self._moved_to(x, target, grad_sbp)

    def _moved_to(self, x: Any, target: TensorSpec, grad_sbp: SbpLike | None) -> Any:
        self.line = user_line()
        x = self._own(x)
        stage = self.program.values[self._known[id(x)]].stage
        assert stage is not None
        if target.placement != x._spec.placement:
            stage = self._next_on(target, stage)
            x = self._move(x, stage, target)
            if grad_sbp is None:
                return x
        given = ((x,), {"sbp": target.sbp, "grad_sbp": grad_sbp})
        return self._run("to_global", type(x).to_global, given, stage)

    def _next_on(self, target: TensorSpec, stage: int) -> int:
        for index, placement in self._stages.items():
            if index >= stage and placement == target.placement:
                return index
        raise ValueError(
            f"{self.program.name}: at {self.line} a tensor of stage {stage} moves to "
            f"{target.placement}, where none of the stages from {stage} on is: "
            + ", ".join(f"stage {i} is on {p}" for i, p in self._stages.items())
            + ".\n  A batch passes stages 0, 1, 2, ... once.\n  Set a stage there."
        )

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
        self.program.losses.append(self._known[id(y)])

    # -- values ------------------------------------------------------------------------------------

    def input(self, x: torch.Tensor) -> Any:
        """Return a stand-in for a tensor among the step's arguments, and note it as an input.

        Values of integers and bools are kept, to answer questions.
        """
        made = stand_in(x)
        stage = self._stage_on(x._spec.placement) if is_global(x) else None  # type: ignore[attr-defined]
        self.program.inputs.append(self._value(made, stage))
        if stage is None and is_followed(x):  # a copy, as the step may write into it
            self._knows(made, x.detach().to("cpu", copy=True), by_inputs=True)
        return made

    def ref(self, x: torch.Tensor) -> Any:
        """Return the ``Ref`` for a tensor that the step returns."""
        index = self._known[id(self._own(x))]
        self._effects.check_read(index, self.program.values[index].stage, "the result", self.line)
        return Ref(index)

    def draws(self) -> int:
        """Return the number of random ops so far, since the recording began."""
        return generator.get_state().counter - self._drawn

    def _own(self, x: torch.Tensor) -> Any:
        """Return the stand-in for a tensor that a call uses, or ``x`` itself if it is one.

        A tensor from before the recording gets a stand-in at its first use.

        Raises:
            RuntimeError: something made ``x`` that is not recorded.
        """
        if id(x) in self._known:
            known = self.program.values[self._known[id(x)]].spec
            if known is not (x._spec if is_global(x) else None):  # type: ignore[attr-defined]
                raise RuntimeError(
                    f"{self.program.name}: at {self.line} a global tensor is used that was made, "
                    "or laid out again, in the program itself.\n"
                    "  What makes global tensors is not recorded.\n"
                    "  Make it before, and pass it as an argument, or let a stage's module make it."
                )
            return x
        if id(x) in self.places:
            owner, key = self.places[id(x)]
            self._value(x, self._stage_on(x._spec.placement))  # type: ignore[attr-defined]
            self.program.values[-1].read = lambda: getattr(owner, key)
            self.program.values[-1].name = key
            return x
        if x.is_meta and not is_global(x):
            raise RuntimeError(
                f"{self.program.name}: at {self.line} a tensor's values or its shard are asked "
                "for, or a tensor is used that something made which is not recorded.\n"
                "  What lies between the modules of stages is recorded once, without values.\n"
                "  Do it inside a stage's module, or before the step."
            )
        made = self._known_real(x)
        return made

    def _known_real(self, x: torch.Tensor) -> Any:
        """Return the stand-in for a tensor from before the step.

        The program reads the tensor itself when it runs.
        """
        key = (-1, id(x), 0)
        if key not in self._entered:
            if x.requires_grad and not is_global(x):
                raise ValueError(
                    f"{self.program.name}: at {self.line} a plain tensor of shape "
                    f"{tuple(x.shape)} that requires grad is used.\n  The parameters of a program "
                    "of stages lie on the placement of a stage.\n"
                    "  Put it there: consistent.parallelize(module, placement)."
                )
            made = self._entered[key] = stand_in(x)
            stage = self._stage_on(x._spec.placement) if is_global(x) else None  # type: ignore[attr-defined]
            self._value(made, stage)
            self.program.values[-1].read = lambda: x
            self._alive.append(x)
        return self._entered[key]

    def _stage_on(self, placement: Placement) -> int:
        for index, where in self._stages.items():
            if where == placement:
                return index
        raise ValueError(
            f"{self.program.name}: a tensor is on {placement}, where no stage is: "
            + ", ".join(f"stage {i} is on {p}" for i, p in self._stages.items())
            + ".\n  Every tensor of the program is on the placement of a stage.\n"
            "  Move it there, or set a stage on its placement."
        )

    def _value(self, x: Any, stage: int | None) -> int:
        spec = x._spec if is_global(x) else None
        self.program.values.append(
            ProgramValue(spec, tuple(x.shape), x.dtype, bool(x.requires_grad), stage)
        )
        self._known[id(x)] = len(self.program.values) - 1
        self._alive.append(x)
        return self._known[id(x)]

    def _indices(self, given: Any) -> list[int]:
        """Return the numbers of the values that the arguments ``given`` hold."""
        return [self._known[id(x)] for x in tensors_in(given)]

    def _latest(self, given: Any) -> int | None:
        """Return the last stage that made a global tensor in ``given``; None if all are plain.

        A call outside the modules of stages runs in this stage.
        """
        made_in = [self._stage_of(x) for x in tensors_in(given) if is_global(x)]
        return max((stage for stage in made_in if stage is not None), default=None)

    def _stage_of(self, x: torch.Tensor) -> int | None:
        return self.program.values[self._known[id(x)]].stage

    def _check_target(self, name: str, given: tuple, stage: int) -> None:
        """Raise if a call of ``stage`` writes into a tensor that another stage made.

        Later lines of that stage would read its own tensor, which the write has not changed.
        """
        for x in tensors_in((given[0][:1], given[1].get("out"))):
            if is_global(x) and (made := self._stage_of(x)) != stage:
                raise RuntimeError(
                    f"{self.program.name}: {name} at {self.line} writes into a tensor of stage "
                    f"{made} what stage {stage} has made.\n"
                    "  A stage hands on what it has made when it ends.\n  Write into a copy."
                )

    @staticmethod
    def _mode() -> tuple[bool, tuple]:
        return torch.is_grad_enabled(), autocast.now()


def entered(x: torch.Tensor, spec: TensorSpec, made_by: str = "") -> Any:
    """Return the plain tensor ``x`` as a global one with ``spec``: each rank keeps its part of it.

    Programs run it where a plain tensor enters a stage. If a module made the tensor (``made_by`` is
    its name), ranks first compare that they have the same.

    Raises:
        RuntimeError: the ranks' tensors differ, or have another shape than when recorded.
    """
    if my_coordinate(spec.placement) is not None:
        if made_by:
            _check_made(x, spec, made_by)
        if x.device.type != spec.placement.type:
            x = x.to(device_of(spec.placement))
    return attach(spread(x, spec), spec)


def _check_made(x: torch.Tensor, spec: TensorSpec, made_by: str) -> None:
    """Raise if ``x``, which a module made, is not as recorded, or differs between ranks."""
    if x.shape != spec.shape or x.dtype != spec.dtype:
        raise RuntimeError(
            f"{made_by}: it returns a plain tensor, {x.dtype}{list(x.shape)}, and one of "
            f"{spec.dtype}{list(spec.shape)} when it was recorded.\n"
            "  What a stage's module returns has the shape that follows from its inputs' shapes.\n"
            "  Return a global tensor: from_local(x, placement, S(0)) if each rank has a part."
        )
    plain_values.compare(made_by, [x], spec.placement, (made_by, x.dtype, x.ndim))
