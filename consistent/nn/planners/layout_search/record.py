"""Recording of a step's logical program, by a run of the step on replicated tensors without values.

Nothing is computed or sent, so one process may record a program for any number of ranks. Integers
and booleans of the example are an exception: values computed from them are known, because models
read masks and tokens, for example to check for padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch

from ....dispatch.plans.shards import is_global, plain
from ....graph.global_ops import BUFFER, INPUT, PARAMETER, GlobalOps
from ....graph.known_values import KnownValues
from ....graph.module_calls import module_calls
from ....graph.reads import is_followed
from ....graph.stand_ins import outside_all_placements, stand_in_of_spec
from ....spec import B, Placement, TensorSpec
from ....spec.nested import map_tensors, tensors_in
from ....spec.tracer import Tracer
from ...slots import Slot, plain_slots
from .program import Enter, Exit, RecordedStep

_REASON = "a plan is searched without values, and here a value is needed"


def record(
    step: Callable[..., Any],
    model: torch.nn.Module,
    placement: Placement,
    args: tuple,
    kwargs: Mapping[str, Any],
) -> RecordedStep:
    """Return the program of ``step(*args, **kwargs)``, in which ``model`` is called.

    The step runs on tensors without values. ``model`` gets its own tensors back afterwards.

    Args:
        step: the function to record.
        model: the module whose layouts are to be chosen.
        placement: the placement for which they are chosen; its ranks need not exist.
        args, kwargs: the arguments of ``step``; tensors in them may be plain or global.

    Raises:
        ValueError: the step reads a value that is not known, or chooses layouts itself.
    """
    recorder = _Recorder(placement)
    with ExitStack() as inside:
        inside.enter_context(outside_all_placements(_REASON, placement.size, plan_each=True))
        inside.enter_context(recorder.with_stand_ins(model))
        inside.enter_context(recorder.listening(model))
        inputs = map_tensors((args, dict(kwargs)), recorder.input)
        try:
            result = step(*inputs[0], **inputs[1])
        except RuntimeError as error:
            if _REASON not in str(error) and "meta tensor" not in str(error):
                raise
            raise ValueError(
                f"best_plan: {type(model).__name__} reads a value of a tensor while it runs, and "
                "plans are searched before there are values.\n"
                f"  {error}\n"
                "  Take what reads it (item(), if x > 0, print) out of the step, or give a plan by "
                "name: parallelize(model, placement, 'zero3')."
            ) from error
        recorder.end(result)
    return recorder.program


class _Recorder:
    """Recorder of the ops and module calls of a step, as a ``RecordedStep`` in ``program``.

    ``with_stand_ins`` and ``listening`` are entered around the step, ``input`` replaces its
    arguments, and ``end`` is called with its result. It keeps every tensor alive, because values
    are identified by the ids of their tensors.
    """

    def __init__(self, placement: Placement) -> None:
        self.program = RecordedStep(placement)
        self._ops = GlobalOps(self.program.values)
        # Values are identified by their tensors, so no tensor may be freed and its id reused.
        self._alive: list[Any] = []
        self._open_modules: list[str] = [""]
        self._inputs: dict[int, Any] = {}
        self._known_values = KnownValues()

    # -- what there is before the step -------------------------------------------------------------

    @contextmanager
    def with_stand_ins(self, model: torch.nn.Module) -> Iterator[None]:
        """Replace the model's tensors by tensors without values inside the ``with`` block.

        The model's own tensors have no gradients meanwhile, so that an optimizer that the step
        calls changes nothing.
        """
        originals: list[tuple[Slot, torch.Tensor, torch.Tensor | None]] = []
        try:
            for places in plain_slots(model):
                value = places[0].value
                stand_in = self._parameter_stand_in(value, places[0].name)
                for slot in places:
                    originals.append((slot, value, value.grad))
                    slot.put(stand_in)
                value.grad = None
            yield
        finally:
            for slot, value, grad in originals:
                value.grad = grad
                slot.put(value)

    def _parameter_stand_in(self, value: torch.Tensor, name: str) -> Any:
        """Return the tensor without values that takes the place of a parameter or buffer."""
        is_parameter = isinstance(value, torch.nn.Parameter)
        stand_in = stand_in_of_spec(self._spec(value))
        if is_parameter:
            stand_in = torch.nn.Parameter(stand_in, requires_grad=value.requires_grad)
        self._add_value(stand_in, PARAMETER if is_parameter else BUFFER, name)
        return stand_in

    def input(self, x: torch.Tensor) -> Any:
        """Return the tensor without values that takes the place of the step's argument ``x``."""
        # A tensor that is passed twice is one value.
        if id(x) not in self._inputs:
            if is_global(x) and x._spec.placement != self.program.placement:  # type: ignore[attr-defined]
                raise ValueError(
                    "best_plan: an example is on another placement than the plan is for.\n"
                    f"  It is {x._spec}, the plan is for {self.program.placement}.\n"  # type: ignore[attr-defined]
                    "  Give a plain tensor, or one on that placement."
                )
            stand_in = stand_in_of_spec(self._spec(x), x.requires_grad)
            index = self._add_value(stand_in, INPUT, f"input {len(self._inputs)}")
            if is_global(x):
                self.program.values[index].fixed = x._spec.sbp  # type: ignore[attr-defined]
            elif x.ndim == 0:
                self.program.values[index].fixed = self._broadcast_sbp()
            elif is_followed(x):
                self._known_values.put(stand_in, x.detach().clone())
            self._inputs[id(x)] = stand_in
            self._alive.append(x)
        return self._inputs[id(x)]

    def _spec(self, x: torch.Tensor) -> TensorSpec:
        """Return the spec of a tensor with the shape and dtype of ``x``, replicated on all axes."""
        return TensorSpec.of(self.program.placement, self._broadcast_sbp(), x.shape, x.dtype)

    def _broadcast_sbp(self) -> tuple:
        return (B,) * self.program.placement.ndim

    # -- what happens ------------------------------------------------------------------------------

    @contextmanager
    def listening(self, model: torch.nn.Module) -> Iterator[None]:
        """Record ops, module calls and backward inside the ``with`` block; refuse ``to_global``."""
        tracer = Tracer(
            on_op_end=self._record_op,
            on_adopt=self._known_values.adopt,
            value_of=self._known_values.get,
            shapes_of=self._known_values.shapes_of,
            handle_backward=self._record_loss,
            handle_to_global=self._refuse_to_global,
        )
        modules = model.named_modules()
        with module_calls(modules, self._record_enter, self._record_exit), tracer.tracing():
            yield

    def _record_enter(self, name: str, args: tuple, kwargs: dict[str, Any]) -> None:
        """Record that a call of the module ``name`` begins."""
        self._open_modules.append(name)
        arguments = {**dict(enumerate(args)), **kwargs}
        self.program.events.append(Enter(name, self._value_numbers(arguments)))

    def _record_exit(self, name: str, result: Any) -> None:
        """Record that a call of the module ``name`` ends."""
        self._open_modules.pop()
        if isinstance(result, torch.Tensor):
            results: Any = {0: result}
        elif isinstance(result, Mapping):
            results = result
        else:
            results = dict(enumerate(result)) if isinstance(result, tuple | list) else {}
        self.program.events.append(Exit(name, self._value_numbers(results)))

    def _value_numbers(self, tensors: Mapping[Any, Any]) -> dict[int | str, int]:
        """Return the numbers of those of ``tensors`` that are values of the program."""
        numbers = {key: self._ops.number_or_none(x) for key, x in tensors.items() if is_global(x)}
        return {key: number for key, number in numbers.items() if number is not None}

    def _record_op(self, plan: Any, operands: list[Any], out: Any, *_: Any) -> None:
        """Record an op that has run; called by the tracer."""
        op = replace(self._ops.op(plan, operands, out), module=self._open_modules[-1])
        self._alive += [*operands, *tensors_in(out)]
        if not plan.call.inplace:
            read = list(zip(op.ins, filter(is_global, operands), strict=True))
            for result, x in zip(op.outs, filter(is_global, tensors_in(out))):
                self.program.same += [(v, result) for v, y in read if _share_storage(x, y)]
        self.program.events.append(op)
        self._known_values.op(plan, operands, out)

    def _add_value(self, x: Any, kind: str, name: str) -> int:
        """Add an input, parameter or buffer to the program, and return its number."""
        self._alive.append(x)
        return self._ops.new(x, kind, name)

    def _record_loss(self, y: Any, *_: Any) -> None:
        """Record a loss in place of running its backward; called by the tracer."""
        self.program.losses.append(self._ops.number(y))

    def _refuse_to_global(self, x: Any, target: TensorSpec, *_: Any) -> Any:
        """Refuse a call of ``to_global``, since the plan is to choose all layouts."""
        raise ValueError(
            f"best_plan: the step lays a tensor out itself, {x._spec} to {target}.\n"
            "  A plan is searched for programs that leave all layouts to it.\n"
            "  Take to_global out of the step."
        )

    def end(self, result: Any) -> None:
        """Record the tensors in ``result``, which the step has returned, as results."""
        for x in tensors_in(result):
            number = self._ops.number_or_none(x) if is_global(x) else None
            if number is not None and number not in self.program.results:
                self.program.results.append(number)


def _share_storage(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Return whether two tensors share a storage, as ``x`` and ``x.contiguous()`` may."""
    x, y = plain(x), plain(y)
    if x.layout is not torch.strided or y.layout is not torch.strided:
        return x is y
    return x.untyped_storage() is y.untyped_storage()
