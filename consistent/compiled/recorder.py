"""Recorder of a step while it runs: each op on shards, each message, and each random op.

The step runs as it otherwise would, so its results are those of an eager call. All ops below
autograd are recorded in an fx graph, in order, including those of backward and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch.fx import Node
from torch.utils._python_dispatch import TorchDispatchMode

from mirrored.comm import Ranks
from mirrored.transports.default import current, replace_current
from mirrored.transports.faults.place import user_line

from ..forms.random import draw, generator
from ..forms.seeds import signed
from ..nn.sharded import prefetch
from ..spec import TensorSpec
from ..spec.nested import map_tensors, tensors_in
from ..spec.tracer import Tracer
from .agreeing import Agreed, Heard, may_raise
from .errors import CannotRecord
from .is_compiling import compiling, tell_compiling
from .messages import Noting
from .node_place import Writes
from .opaque import DRAWN, MESSAGE, START, WAIT, OpaqueCall, shape_of
from .program import GRAPH_BREAK, Read
from .random_op import RandomOp
from .recordable import READS, PythonReads, check_printable, check_values, reads_value
from .recorded_graph import RecordedGraph
from .seeds import seeds

_aten = torch.ops.aten
_Off = torch._C.DisableTorchFunction
_LINES = 3  # source lines of the step that are stored for one message
_CONSTANTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the ops of a step in the fx graph of ``recorded``.

    If something cannot be recorded, ``why`` becomes the reason, and the step runs on unrecorded.

    Args:
        name: name of the step in messages.
        calls: dict into which recorded messages and random ops are put, by number.
    """

    def __init__(self, name: str, calls: dict[int, OpaqueCall]) -> None:
        super().__init__()
        self.name = name
        self.why: str | None = None  # why there is no program, once that is certain
        self.ran_backward = False
        self.left_to_python: set[int] = set()
        self.recorded = RecordedGraph(name)
        self.calls = calls
        self._seeds = seeds()
        self._start = generator.get_state()
        self._boxing: tuple[TensorSpec, TensorSpec] | None = None
        self._paused = 0
        self._agreeing: list[Ranks] = []  # stack of the ranks that exchange errors after an op
        self._telling: list[Node] = []  # ``Agreed`` ops since the outermost agreement began
        self._objects: list[Any] = []

    @property
    def is_paused(self) -> bool:
        """Return whether recording is paused or was given up, so that ops are not recorded now."""
        return self._paused > 0

    def refuse(self, why: str) -> None:
        """Stop recording for good: the step gets no program, for the reason ``why``.

        The rest of this call of the step runs as written.
        """
        self._fail(CannotRecord(f"{self.name}: at {user_line() or 'its end'}, {why}"))

    def _fail(self, error: CannotRecord) -> None:
        if self.why is None:
            self.why = str(error)
            self._paused += 1  # never undone: nothing more is recorded
            tell_compiling(False)

    def found(self, x: torch.Tensor) -> Node | None:
        """Return the fx node of the value of ``x``; None if it is unknown or recording has stopped.

        An unknown value stops recording: the step gets no program, and runs on as written.
        """
        if self.why is not None:
            return None
        try:
            return self.recorded.node_of(x)
        except CannotRecord as error:
            self._fail(error)
            return None

    # -- while it runs -----------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all ops and messages that run inside the block."""
        with ExitStack() as stack:
            noting = Noting(
                current(), self._message, self._started, self._waited, self.refuse, self._tells
            )
            stack.enter_context(replace_current(noting))
            tracer = Tracer(
                on_boxing_begin=self._observed,
                on_agreement=self._agrees,
                watch_writes=self.recorded.watch_writes,
            )
            stack.enter_context(tracer.tracing())
            stack.enter_context(prefetch.switched_off())
            stack.enter_context(PythonReads(self._python_reads))
            stack.enter_context(self)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing that runs inside the block."""
        self._paused += 1
        try:
            with replace_current(_inner(current())), compiling(False):
                yield
        finally:
            self._paused -= 1
            if self.why is not None:  # given up meanwhile: the step runs on as written
                tell_compiling(False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _Off():
            if not self._paused:
                try:
                    return self._op(func, args, kwargs)
                except CannotRecord as error:
                    self._fail(error)
            return func(*args, **kwargs)

    def _op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.ran_backward |= torch._C._current_graph_task_id() != -1
        if func in _CONSTANTS:
            return self.recorded.constant(func, args, kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        recorded = self.recorded
        nodes = {id(x): recorded.node_of(x) for x in tensors_in((args, kwargs))}
        fixed = all(map(recorded.is_fixed, nodes.values()))
        if not fixed:
            check_values(recorded, func, args)
        check_printable(self.name, func, (args, kwargs))
        if func.namespace == "consistent" and any(
            a.name == "counter" for a in func._schema.arguments
        ):
            return self._draws(func, args, kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded:
            self._check_seeded(func)
            fixed = False
        ranks = self._agreeing[0] if self._agreeing else None
        if ranks is None and func is _aten._assert_async.msg:
            ranks = ()  # the condition is the same on all ranks, so errors need no exchange
        if ranks is not None and may_raise(func):
            if not any(x.is_meta for x in tensors_in((args, kwargs))):
                return self._agreed(func, args, kwargs, ranks)
            # Meta tensors: this rank is outside the placement, and only takes part in the exchange.
            self._message(Heard(func, ranks).call(), [], [])
        out = func(*args, **kwargs)
        if seeded:
            self._seeds = seeds()
        if func in READS:
            return out
        if func.is_view and isinstance(out, torch.Tensor) and recorded.memory.find(out) is not None:
            return out  # such as detach(x): the same memory is the same value
        recorded.note(func, args, kwargs, out, nodes, fixed)
        return out

    def _python_reads(self, x: torch.Tensor, what: str) -> None:
        """Stop recording if Python is about to read values of ``x`` that may differ between runs.

        Called before a method such as ``tolist()``; ``what`` is the name of the method.
        """
        if self._paused:
            return
        with _Off():
            found = self.recorded.memory.find(x)
        if not isinstance(found, Node) or not self.recorded.is_fixed(found):
            self._fail(CannotRecord(reads_value(self.name, what)))

    # -- messages ----------------------------------------------------------------------------------

    def _observed(self, src: TensorSpec, dst: TensorSpec, moves: Any) -> None:
        self._boxing = src, dst

    def _message(
        self, call: OpaqueCall, given: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        if self._paused:
            return
        with _Off():
            found = [self.found(x) for x in given]
            if self.why is not None:
                return
            nodes = found
            self._keep_call(call)
            node = self.recorded.add(MESSAGE, (nodes, call.number), {})
            self._mark(node, call)
            for i, x in enumerate(results):
                self.recorded.item(node, i, x)

    def _started(self, call: OpaqueCall, x: torch.Tensor) -> None:
        self._in_place(START, call, x)

    def _waited(self, call: OpaqueCall, x: torch.Tensor) -> None:
        self._in_place(WAIT, call, x)

    def _in_place(self, op: Any, call: OpaqueCall, x: torch.Tensor) -> None:
        if self._paused:
            return
        with _Off():
            found = self.found(x)
            if found is None:
                return
            self._keep_call(call)
            node = self.recorded.add(op, (found, call.number), {})
            self.recorded.writes(node, [x])
            self._mark(node, call)

    # -- ops that may raise on some ranks alone ----------------------------------------------------

    def _agrees(self, ranks: Ranks, begins: bool) -> None:
        # Called before and after ``ranks`` exchange whether an op raised. These calls nest if ranks
        # outside the placement take part too. The outermost ranks include all inner ones, so one
        # exchange between the outermost ranks is enough.
        self._agreeing = [*self._agreeing, ranks] if begins else self._agreeing[:-1]
        if len(self._agreeing) == 1 and begins or not self._agreeing:
            self._telling = []

    def _tells(self, ranks: Ranks) -> bool:
        """Return whether the next all-reduce can also exchange the errors of the ops before it.

        Called by the transport wrapper ``Noting`` before such an all-reduce; ``ranks`` exchange the
        errors. If the result is true, the ``Agreed`` ops recorded before are changed to send
        nothing unless they raise.
        """
        if self._paused or not self._agreeing or self._agreeing[0] != ranks:
            return False
        for node in self._telling:
            nodes, number = node.args
            before = self.calls[number]  # type: ignore[index]
            later = before.run.told_later()  # type: ignore[union-attr]
            call = replace(later.call([]), outs=before.outs, where=before.where)
            self.calls[call.number] = call
            node.args, node.meta["text"] = (nodes, call.number), call.text
        self._telling = []
        return True

    def _agreed(self, func: Any, args: tuple, kwargs: dict[str, Any], ranks: Ranks) -> Any:
        """Run an op that may raise on some of ``ranks`` only; record it as an ``Agreed`` message.

        In the program, this message exchanges errors: if the op raises on one rank, all of
        ``ranks`` raise.
        """
        op, given = Agreed(func, args, kwargs, ranks), tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        results = op.results(out, given)
        if op.writes:
            results = [results[0].clone(memory_format=torch.contiguous_format)]
        self._message(op.call(results), given, results)
        if self._paused:
            return out
        self._telling.append(self.recorded.node_of(results[0]).args[0])  # type: ignore[arg-type]
        if not op.writes:
            made = iter(results)
            return map_tensors(out, lambda _: next(made))
        self.recorded.overwrite(given[0], self.recorded.node_of(results[0]))
        return out

    def _keep_call(self, call: OpaqueCall) -> None:
        known = self.calls.get(call.number)
        lines = known.where.split(" and ") if known is not None else []
        if (line := user_line()) not in lines and len(lines) < _LINES:
            lines.append(line)
        self.calls[call.number] = replace(call, where=" and ".join(lines))

    def _mark(self, node: Node, call: OpaqueCall) -> None:
        node.meta["text"] = call.text
        node.meta["boxing"], self._boxing = self._boxing, None

    # -- random numbers ----------------------------------------------------------------------------

    def _draws(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        names = [a.name for a in func._schema.arguments]
        at = names.index("counter")
        values = [*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)]
        offset = values[at] - self._start.counter
        # The draws of a segment are recorded relative to its start, so they must come from the same
        # seed.
        if signed(self._start.seed) != values[at - 1] or offset < 0:
            raise CannotRecord(
                f"{self.name}: at {user_line()}, random numbers are drawn from a generator of the "
                "user's, or after manual_seed.\n  A program goes on from where torch's own is.\n"
                "  Leave generator= out, and seed outside the step."
            )
        nodes = [self.recorded.node_of(x) for x in tensors_in(values)]
        out = func(*args, **kwargs)
        filled = func._schema.is_mutable
        made = [values[0]] if filled else [out]
        call = OpaqueCall(
            f"{func} {offset} {map_tensors(values[: at - 1], shape_of)!r} {values[at + 1 :]!r}",
            RandomOp(func, values, at, offset, filled),
            tuple(map(shape_of, made)),
        )
        self.calls[call.number] = call
        node = self.recorded.add(DRAWN, (nodes, self._key(), call.number), {})
        item = self.recorded.item(node, 0, None if filled else out)
        if filled:
            self.recorded.overwrite(values[0], item)
        return out

    def _key(self) -> Node:
        for node, read in self.recorded.reads.items():
            if read.kind == "key" and read.segment == self._segment():
                return node
        node = self.recorded.graph.placeholder(f"key_{len(self.recorded.reads)}")
        self.recorded.reads[node] = Read("key", segment=self._segment())
        return node

    def _segment(self) -> int:
        return sum(node.target is GRAPH_BREAK for node in self.recorded.graph.nodes)

    def check_seeds(self) -> None:
        """Stop recording if the step has set the state of torch's random generators.

        Setting it is not an op, so a program would not repeat it.
        """
        if not self.is_paused and self._seeds != seeds():
            self.refuse(
                "the step sets the state of torch's random numbers (manual_seed, set_rng_state, "
                "fork_rng, or a checkpoint around random ops on plain tensors).\n"
                "  A program would draw other numbers.\n  Set it outside the step."
            )

    def _check_seeded(self, func: Any) -> None:
        self.check_seeds()
        if self.why is not None:
            raise CannotRecord(self.why)
        if draw.is_seeding():
            raise CannotRecord(
                f"{self.name}: at {user_line()}, {func} draws with a seed of its own, which a "
                "program would repeat.\n  Draw it outside the step, and pass it in."
            )

    def drawn(self) -> int:
        """Return how many draws this library's random ops made since the present segment began."""
        return generator.get_state().counter - self._start.counter

    # -- calls that stay as they are ---------------------------------------------------------------

    def break_graph(self, run: Callable[[], Any], text: str, writes: Writes) -> Any:
        """Run ``run()`` without recording it, and end the segment of recorded ops: a graph break.

        Each run of the program calls ``run()`` there again.

        Args:
            text: description of the call, for ``show()``.
            writes: assignments since the previous graph break, which the program makes before
                ``run()``.
        """
        node = self.recorded.graph.call_function(GRAPH_BREAK, (len(self._objects),))
        self._objects.append(run)
        node.meta["text"], node.meta["where"] = text, user_line()
        node.meta["draws"], node.meta["writes"] = self.drawn(), writes
        with self.paused():
            out = run()
        # The draws of the next segment are counted from here.
        self._start, self._seeds = generator.get_state(), seeds()
        return out

    @property
    def objects(self) -> list[Any]:
        """The functions that run at graph breaks, in order."""
        return self._objects


def _inner(transport: Any) -> Any:
    return transport.inner if isinstance(transport, Noting) else transport
