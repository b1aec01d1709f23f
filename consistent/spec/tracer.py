"""Tracers: callbacks that observe or steer a program of global tensors.

```
with Tracer(on_op_end=note_op, on_boxing_begin=note_boxing).tracing():
    loss = step(batch)
```

Reports, ``explain``, the recorders of pipelines, plans and compiled steps, and the simulation
observe a program this way. A package installs a tracer for the life of the process if it reacts to
events of a package that it depends on, and that therefore cannot call it. The modules that prefetch
the operands of the next op do so:

```
Tracer(on_move=forget_shards).install()
```

While nothing traces, an event costs a test for an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tracer:
    """Callbacks for the events of a program, each of which may be left out.

    Callbacks that begin with ``on_`` are notified of events. If an event begins and ends, tracers
    nest as ``with`` blocks do: the tracer entered last is called last at the beginning and first at
    the end. The other callbacks answer a question (``value_of``) or replace an action
    (``handle_backward``); that of the tracer entered last is used first.

    Below ``(plan)`` and the like are the arguments with which a callback is called.

    Args:
        on_plan: (plan), each plan of an op when it is made.
        on_op_begin: (plan), before each op.
        on_op_end: (plan, operands, result, specs, outs), after each op: its global operands and its
            result, the specs with which the operands were passed, and the specs of the result. Ops
            over lists pass no operands, and None for the result.
        on_adopt: (x, made), each plain tensor that an op takes, and the B global tensor made of it.
        on_agreement: (ranks, begins), before and after ranks exchange whether an op raised.
        on_boxing_begin: (src, dst, steps), before each boxing.
        on_boxing_end: (src, dst), after each boxing that the program waits for.
        on_to_global: (x, moved), after each ``to_global`` that moves something.
        on_layout_read: (x), a tensor whose layout or shard the program reads.
        before_read: (x), before a global tensor is read by something other than an op of torch,
            such as ``to_global`` or an autograd Function.
        on_backward: (begins), before and after each pass of torch's engine over global tensors.
        on_compiled: (what, begins), actions of a compiled step (``compiled/watching.py``).
        on_data: (alias), each tensor that ``x.data`` makes: writes into it do not raise the version
            counter of x.
        on_optimizer_step: (optimizer), before each step of an optimizer, and before its parameters
            are boxed to the layouts of the step.
        on_routed: (ranks, number of rows for each of them), before the tokens of a mixture of
            experts are sent to the ranks of their experts.
        on_move: (), after ``move`` has laid the tensors of a job out on other ranks.
        choose: (call, specs, SBP signatures by axis, pin) -> those that an op uses, or None to
            leave the choice to the library. pin: the SBPs that the result of an in-place op must
            have, else None. No plan is cached meanwhile.
        watch_writes: (x) -> a function that returns later whether an op has written into x since.
        value_of: (x) -> the value of a tensor without data, or None if it is not known.
        shapes_of: (function, args, kwargs) -> the result of an op whose shapes depend on values, on
            ``meta``, or None if the values that decide them are not known.
        world: () -> the ``World`` that placements are checked against.
        lacks_values: (x) -> whether x, a plain tensor, has no values that may be read.
        handle_to_global: (x, target, SBP of the gradient) -> the moved tensor, in place of a move.
        handle_backward: (y, gradient, retain_graph, create_graph), in place of ``y.backward()``.
        handle_schedule: (run), in place of running the schedule of a pipeline.
        handle_arriving: (nodes, gradients, specs, coders=codecs), in backward, before gradients of
            boxed operands are sent to leaves -> for each gradient None if it was taken over, for
            example into a bucket, else the gradient, to be boxed (``movement/boxed.py``).
        handle_ahead: (operands, routes), before an op gathers operands, with the specs (stored,
            gathered) of each -> (for each operand its prefetched value, or None; a function that
            prefetches the operands of the next op).
    """

    on_plan: Callable[[Any], None] | None = None
    on_op_begin: Callable[[Any], None] | None = None
    on_op_end: Callable[[Any, Any, Any, Any, Any], None] | None = None
    on_adopt: Callable[[Any, Any], None] | None = None
    on_agreement: Callable[[Any, bool], None] | None = None
    on_boxing_begin: Callable[[Any, Any, Any], None] | None = None
    on_boxing_end: Callable[[Any, Any], None] | None = None
    on_to_global: Callable[[Any, Any], None] | None = None
    on_layout_read: Callable[[Any], None] | None = None
    before_read: Callable[[Any], None] | None = None
    on_backward: Callable[[bool], None] | None = None
    on_compiled: Callable[[Any, bool], None] | None = None
    on_data: Callable[[Any], None] | None = None
    on_optimizer_step: Callable[[Any], None] | None = None
    on_routed: Callable[[Any, Any], None] | None = None
    on_move: Callable[[], None] | None = None
    choose: Callable[[Any, Any, Any, Any], Any] | None = None
    watch_writes: Callable[[Any], Callable[[], bool]] | None = None
    value_of: Callable[[Any], Any] | None = None
    shapes_of: Callable[[Any, Any, Any], Any] | None = None
    world: Callable[[], Any] | None = None
    lacks_values: Callable[[Any], bool] | None = None
    handle_to_global: Callable[[Any, Any, Any], Any] | None = None
    handle_backward: Callable[[Any, Any, Any, Any], None] | None = None
    handle_schedule: Callable[[Any], None] | None = None
    handle_arriving: Callable[..., Any] | None = None
    handle_ahead: Callable[[Any, Any], Any] | None = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Send events to this tracer inside the ``with`` block."""
        with ExitStack() as stack:
            self._enter(stack)
            yield

    def install(self) -> None:
        """Send events to this tracer as long as the process lives."""
        self._enter(ExitStack())

    def _enter(self, stack: ExitStack) -> None:
        """Add this tracer's callbacks to the lists of their events; ``stack`` removes them."""
        for event, callbacks in _CALLBACKS.items():
            callback = getattr(self, event)
            if callback is None:
                continue
            is_end = event.endswith("_end")
            # Ends in reverse order of beginnings, so that tracers nest.
            callbacks.insert(0 if is_end else len(callbacks), callback)
            stack.callback(callbacks.remove, callback)
        if self.on_op_begin or self.on_op_end or self.choose:
            op_tracers.append(self)
            stack.callback(op_tracers.remove, self)


_CALLBACKS: dict[str, list[Callable[..., Any]]] = {field.name: [] for field in fields(Tracer)}

# Tracers that see ops. While there is one, the dispatch hook in C++ leaves all plans to Python,
# which calls the tracers.
op_tracers: list[Tracer] = []


def callbacks(event: str) -> list[Callable[..., Any]]:
    """Return the callbacks of ``event``, such as ``"on_plan"``, for the code that emits the event.

    It is always the same list object, so a module may keep it: ``for notify in list: notify(...)``.
    """
    return _CALLBACKS[event]


@contextmanager
def without_callbacks(event: str) -> Iterator[None]:
    """Call no callback of ``event`` inside the ``with`` block.

    A callback that replaces an action (``handle_backward``) uses this to run the original action
    without being called again.
    """
    active = _CALLBACKS[event]
    saved, active[:] = active[:], []
    try:
        yield
    finally:
        active[:] = saved
