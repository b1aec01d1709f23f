"""Tracing a program of global tensors: one object to subscribe with, for all that happens in it.

```
with Tracer(on_op_end=note_op, on_boxing_begin=note_boxing).tracing():
    loss = step(batch)
```

Reports, ``explain``, the recorders of pipelines, plans and compiled steps, and the simulation see
a program through it. What a folder does for one below it, such as modules that send for the
operands of the next op, is entered once for the life of the process:

```
Tracer(on_move=forget_shards).always()
```

While nothing traces, each event costs the test of an empty list.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Tracer:
    """Callbacks, each of which may be left out.

    Those that begin with ``on_`` are notified. Of an event that begins and ends, the tracer that
    came last sees the beginning last and the end first, so tracers nest as ``with`` blocks do. The
    others are asked, the tracer that came last before the others.

    Args:
        on_plan: (plan), each plan of an op as it is made.
        on_op_begin: (plan), before each op.
        on_op_end: (plan, operands, result, specs, outs), after each op: its global operands and its
            result, the specs of the operands as they were given, and those of the result. Ops over
            lists give no operands, and None for the result.
        on_agreement: (ranks, begins), around an op whose ranks tell each other whether it raised.
        on_boxing_begin: (src, dst, steps), before each boxing.
        on_boxing_end: (src, dst), after each boxing that the program waits for.
        on_to_global: (x, moved), after each ``to_global`` that moves something.
        on_layout_read: (x), a tensor whose layout or shard the program asks for.
        on_backward: (begins), around each pass of torch's engine over global tensors.
        on_compiled: (what, begins), what a compiled step does (``compiled/watching.py``).
        on_data: (alias), each tensor that ``x.data`` makes: writes into it are not counted in x.
        on_optimizer_step: (optimizer), before each step of an optimizer, and before its parameters
            are laid as they step.
        on_routed: (ranks, how many rows each of them gets), before the tokens of a mixture are sent
            to the ranks of their experts.
        on_move: (), when ``move`` has laid the tensors of a job on other ranks.
        choose: (call, specs, signatures by axis, pin) -> the signatures of an op, or None to leave
            the choice to the library. No plan is kept meanwhile.
        watch_writes: (x) -> a function that says later whether an op has written into x since.
        value_of: (x) -> the value of a tensor that has none, or None where it is not known.
        lacks_values: (x) -> whether x, a plain tensor, has no values that may be read.
        handle_to_global: (x, target, SBP of the gradient) -> the moved tensor, in place of a move.
        handle_backward: (y, gradient, retain_graph, create_graph), in place of ``y.backward()``.
        handle_schedule: (run), in place of running the schedule of a pipeline.
        handle_arriving: (nodes, gradients, specs, start) -> the gradients that are still to be
            boxed, of those of an op's operands on their way to leaves (``movement/boxed.py``).
        handle_ahead: (operands, routes) -> (what was sent for in advance and has arrived, or None,
            of each; what sends for the operands of the next op).
    """

    on_plan: Callable[[Any], None] | None = None
    on_op_begin: Callable[[Any], None] | None = None
    on_op_end: Callable[[Any, Any, Any, Any, Any], None] | None = None
    on_agreement: Callable[[Any, bool], None] | None = None
    on_boxing_begin: Callable[[Any, Any, Any], None] | None = None
    on_boxing_end: Callable[[Any, Any], None] | None = None
    on_to_global: Callable[[Any, Any], None] | None = None
    on_layout_read: Callable[[Any], None] | None = None
    on_backward: Callable[[bool], None] | None = None
    on_compiled: Callable[[Any, bool], None] | None = None
    on_data: Callable[[Any], None] | None = None
    on_optimizer_step: Callable[[Any], None] | None = None
    on_routed: Callable[[Any, Any], None] | None = None
    on_move: Callable[[], None] | None = None
    choose: Callable[[Any, Any, Any, Any], Any] | None = None
    watch_writes: Callable[[Any], Callable[[], bool]] | None = None
    value_of: Callable[[Any], Any] | None = None
    lacks_values: Callable[[Any], bool] | None = None
    handle_to_global: Callable[[Any, Any, Any], Any] | None = None
    handle_backward: Callable[[Any, Any, Any, Any], None] | None = None
    handle_schedule: Callable[[Any], None] | None = None
    handle_arriving: Callable[..., Any] | None = None
    handle_ahead: Callable[[Any, Any], Any] | None = None

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Inside, the program comes here."""
        with ExitStack() as stack:
            self._enter(stack)
            yield

    def always(self) -> None:
        """From now on, the program comes here."""
        self._enter(ExitStack())

    def _enter(self, stack: ExitStack) -> None:
        for event, callbacks in _CALLBACKS.items():
            mine = getattr(self, event)
            if mine is None:
                continue
            is_end = event.endswith("_end")
            callbacks.insert(0 if is_end else len(callbacks), mine)
            stack.callback(callbacks.remove, mine)
        if self.on_op_begin or self.on_op_end or self.choose:
            op_tracers.append(self)
            stack.callback(op_tracers.remove, self)


_CALLBACKS: dict[str, list[Callable[..., Any]]] = {field.name: [] for field in fields(Tracer)}

# The tracers that see ops. While there is one, the hook leaves all plans to Python, which calls
# them.
op_tracers: list[Tracer] = []


def callbacks(event: str) -> list[Callable[..., Any]]:
    """The callbacks for an event now; always the same list."""
    return _CALLBACKS[event]


@contextmanager
def set_aside(event: str) -> Iterator[None]:
    """Inside, ``event`` has no callbacks: one that passes a call on must not be called again."""
    now = _CALLBACKS[event]
    kept, now[:] = now[:], []
    try:
        yield
    finally:
        now[:] = kept
