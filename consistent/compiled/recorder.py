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
from ..forms.seeds import signed_seed
from ..nn.sharded import prefetch
from ..spec import TensorSpec
from ..spec.nested import map_tensors, tensors_in
from ..spec.tracer import Tracer
from .agreeing import AgreedOp, ErrorExchange, may_raise
from .errors import CannotRecord
from .is_compiling import compiling, tell_compiling
from .messages import RecordingTransport
from .node_place import Writes
from .opaque import DRAWN, MESSAGE, START_REDUCE, WAIT_REDUCE, OpaqueCall, shape_of
from .program import GRAPH_BREAK, Read
from .random_op import RandomOp
from .recordable import READ_OPS, PythonReads, check_printable, check_values, value_read_error
from .recorded_graph import RecordedGraph
from .seeds import generator_states

_aten = torch.ops.aten
_DisableTorchFunction = torch._C.DisableTorchFunction
_MAX_LINES = 3  # source lines of the step that are stored for one message
_CONSTANT_OPS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)


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
        self.unrecorded_owners: set[int] = set()
        self.recorded = RecordedGraph(name)
        self.calls = calls
        self._seeds = generator_states()
        self._segment_start = generator.get_state()
        self._boxing: tuple[TensorSpec, TensorSpec] | None = None
        self._pause_depth = 0
        # Stack of the ranks that exchange errors after an op.
        self._agreeing_ranks: list[Ranks] = []
        # Of each ``AgreedOp`` since the outermost agreement began.
        self._agreed_nodes: list[Node] = []
        self._break_calls: list[Any] = []

    @property
    def is_paused(self) -> bool:
        """Return whether recording is paused or was given up, so that ops are not recorded now."""
        return self._pause_depth > 0

    def give_up(self, why: str) -> None:
        """Stop recording for good: the step gets no program, for the reason ``why``.

        The rest of this call of the step runs as written.
        """
        self._stop_recording(CannotRecord(f"{self.name}: at {user_line() or 'its end'}, {why}"))

    def _stop_recording(self, error: CannotRecord) -> None:
        if self.why is None:
            self.why = str(error)
            self._pause_depth += 1  # never undone: nothing more is recorded
            tell_compiling(False)

    def node_or_none(self, x: torch.Tensor) -> Node | None:
        """Return the fx node of the value of ``x``; None if it is unknown or recording has stopped.

        An unknown value stops recording: the step gets no program, and runs on as written.
        """
        if self.why is not None:
            return None
        try:
            return self.recorded.node_of(x)
        except CannotRecord as error:
            self._stop_recording(error)
            return None

    # -- while it runs -----------------------------------------------------------------------------

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Record all ops and messages that run inside the block."""
        with ExitStack() as stack:
            transport = RecordingTransport(
                current(),
                self._record_message,
                self._on_reduce_start,
                self._on_reduce_wait,
                self.give_up,
                self._let_sum_carry_errors,
            )
            stack.enter_context(replace_current(transport))
            tracer = Tracer(
                on_boxing_begin=self._on_boxing,
                on_agreement=self._on_agreement,
                watch_writes=self.recorded.watch_writes,
            )
            stack.enter_context(tracer.tracing())
            stack.enter_context(prefetch.prefetch_off())
            stack.enter_context(PythonReads(self._on_python_read))
            stack.enter_context(self)
            yield

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Record nothing that runs inside the block."""
        self._pause_depth += 1
        try:
            with replace_current(_without_recording(current())), compiling(False):
                yield
        finally:
            self._pause_depth -= 1
            if self.why is not None:  # given up meanwhile: the step runs on as written
                tell_compiling(False)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with _DisableTorchFunction():
            if not self._pause_depth:
                try:
                    return self._record_op(func, args, kwargs)
                except CannotRecord as error:
                    self._stop_recording(error)
            return func(*args, **kwargs)

    def _record_op(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.ran_backward |= torch._C._current_graph_task_id() != -1
        if func in _CONSTANT_OPS:
            return self.recorded.record_constant(func, args, kwargs)
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
            return self._record_draw(func, args, kwargs)
        seeded = torch.Tag.nondeterministic_seeded in func.tags
        if seeded:
            self._check_seeded_op(func)
            fixed = False
        ranks = self._agreeing_ranks[0] if self._agreeing_ranks else None
        if ranks is None and func is _aten._assert_async.msg:
            ranks = ()  # the condition is the same on all ranks, so errors need no exchange
        if ranks is not None and may_raise(func):
            if not any(x.is_meta for x in tensors_in((args, kwargs))):
                return self._record_agreed_op(func, args, kwargs, ranks)
            # Meta tensors: this rank is outside the placement, and only takes part in the exchange.
            self._record_message(ErrorExchange(func, ranks).call(), [], [])
        out = func(*args, **kwargs)
        if seeded:
            self._seeds = generator_states()
        if func in READ_OPS:
            return out
        if func.is_view and isinstance(out, torch.Tensor) and recorded.memory.find(out) is not None:
            return out  # such as detach(x): the same memory is the same value
        recorded.add_op(func, args, kwargs, out, nodes, fixed)
        return out

    def _on_python_read(self, x: torch.Tensor, what: str) -> None:
        """Stop recording if Python is about to read values of ``x`` that may differ between runs.

        Called before a method such as ``tolist()``; ``what`` is the name of the method.
        """
        if self._pause_depth:
            return
        with _DisableTorchFunction():
            value = self.recorded.memory.find(x)
        if not isinstance(value, Node) or not self.recorded.is_fixed(value):
            self._stop_recording(CannotRecord(value_read_error(self.name, what)))

    # -- messages ----------------------------------------------------------------------------------

    def _on_boxing(self, src: TensorSpec, dst: TensorSpec, moves: Any) -> None:
        self._boxing = src, dst

    def _record_message(
        self, call: OpaqueCall, inputs: list[torch.Tensor], results: list[torch.Tensor]
    ) -> None:
        if self._pause_depth:
            return
        with _DisableTorchFunction():
            nodes_or_none = [self.node_or_none(x) for x in inputs]
            if self.why is not None:
                return
            nodes = nodes_or_none
            self._store_call(call)
            node = self.recorded.add(MESSAGE, (nodes, call.number), {})
            self._describe_message(node, call)
            for i, x in enumerate(results):
                self.recorded.add_item(node, i, x)

    def _on_reduce_start(self, call: OpaqueCall, x: torch.Tensor) -> None:
        self._record_in_place_reduce(START_REDUCE, call, x)

    def _on_reduce_wait(self, call: OpaqueCall, x: torch.Tensor) -> None:
        self._record_in_place_reduce(WAIT_REDUCE, call, x)

    def _record_in_place_reduce(self, op: Any, call: OpaqueCall, x: torch.Tensor) -> None:
        if self._pause_depth:
            return
        with _DisableTorchFunction():
            x_node = self.node_or_none(x)
            if x_node is None:
                return
            self._store_call(call)
            node = self.recorded.add(op, (x_node, call.number), {})
            self.recorded.note_writes(node, [x])
            self._describe_message(node, call)

    # -- ops that may raise on some ranks only -----------------------------------------------------

    def _on_agreement(self, ranks: Ranks, begins: bool) -> None:
        # Called before and after ``ranks`` exchange whether an op raised. These calls nest if ranks
        # outside the placement take part too. The outermost ranks include all inner ones, so one
        # exchange between the outermost ranks is enough.
        self._agreeing_ranks = (
            [*self._agreeing_ranks, ranks] if begins else self._agreeing_ranks[:-1]
        )
        if len(self._agreeing_ranks) == 1 and begins or not self._agreeing_ranks:
            self._agreed_nodes = []

    def _let_sum_carry_errors(self, ranks: Ranks) -> bool:
        """Return whether the next all-reduce can also exchange the errors of the ops before it.

        Called by the transport wrapper ``RecordingTransport`` before such an all-reduce; ``ranks``
        exchange the errors. If the result is true, each ``AgreedOp`` recorded before is changed to
        send nothing unless it raises.
        """
        if self._pause_depth or not self._agreeing_ranks or self._agreeing_ranks[0] != ranks:
            return False
        for node in self._agreed_nodes:
            nodes, number = node.args
            call_before = self.calls[number]  # type: ignore[index]
            agreed = call_before.run.with_deferred_report()  # type: ignore[union-attr]
            new_call = replace(agreed.call([]), outs=call_before.outs, where=call_before.where)
            self.calls[new_call.number] = new_call
            node.args, node.meta["text"] = (nodes, new_call.number), new_call.text
        self._agreed_nodes = []
        return True

    def _record_agreed_op(
        self, func: Any, args: tuple, kwargs: dict[str, Any], ranks: Ranks
    ) -> Any:
        """Run an op that may raise on some of ``ranks`` only; record it as an ``AgreedOp`` message.

        In the program, this message exchanges errors: if the op raises on one rank, all of
        ``ranks`` raise.
        """
        op, inputs = AgreedOp(func, args, kwargs, ranks), tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        results = op.results(out, inputs)
        if op.writes:
            results = [results[0].clone(memory_format=torch.contiguous_format)]
        self._record_message(op.call(results), inputs, results)
        if self._pause_depth:
            return out
        self._agreed_nodes.append(self.recorded.node_of(results[0]).args[0])  # type: ignore[arg-type]
        if not op.writes:
            results_left = iter(results)
            return map_tensors(out, lambda _: next(results_left))
        self.recorded.overwrite(inputs[0], self.recorded.node_of(results[0]))
        return out

    def _store_call(self, call: OpaqueCall) -> None:
        earlier_call = self.calls.get(call.number)
        lines = earlier_call.where.split(" and ") if earlier_call is not None else []
        if (line := user_line()) not in lines and len(lines) < _MAX_LINES:
            lines.append(line)
        self.calls[call.number] = replace(call, where=" and ".join(lines))

    def _describe_message(self, node: Node, call: OpaqueCall) -> None:
        node.meta["text"] = call.text
        node.meta["boxing"], self._boxing = self._boxing, None

    # -- random numbers ----------------------------------------------------------------------------

    def _record_draw(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        names = [a.name for a in func._schema.arguments]
        counter_index = names.index("counter")
        values = [*args, *(kwargs[n] for n in names[len(args) :] if n in kwargs)]
        offset = values[counter_index] - self._segment_start.counter
        # The draws of a segment are recorded relative to its start, so they must come from the same
        # seed.
        if signed_seed(self._segment_start.seed) != values[counter_index - 1] or offset < 0:
            raise CannotRecord(
                f"{self.name}: at {user_line()}, random numbers are drawn from a generator of the "
                "user's, or after manual_seed.\n  A program goes on from where torch's own is.\n"
                "  Leave generator= out, and seed outside the step."
            )
        nodes = [self.recorded.node_of(x) for x in tensors_in(values)]
        out = func(*args, **kwargs)
        in_place = func._schema.is_mutable
        results = [values[0]] if in_place else [out]
        call = OpaqueCall(
            f"{func} {offset} {map_tensors(values[: counter_index - 1], shape_of)!r} "
            f"{values[counter_index + 1 :]!r}",
            RandomOp(func, values, counter_index, offset, in_place),
            tuple(map(shape_of, results)),
        )
        self.calls[call.number] = call
        node = self.recorded.add(DRAWN, (nodes, self._key_node(), call.number), {})
        item = self.recorded.add_item(node, 0, None if in_place else out)
        if in_place:
            self.recorded.overwrite(values[0], item)
        return out

    def _key_node(self) -> Node:
        for node, read in self.recorded.reads.items():
            if read.kind == "key" and read.segment == self._segment_index():
                return node
        node = self.recorded.graph.placeholder(f"key_{len(self.recorded.reads)}")
        self.recorded.reads[node] = Read("key", segment=self._segment_index())
        return node

    def _segment_index(self) -> int:
        return sum(node.target is GRAPH_BREAK for node in self.recorded.graph.nodes)

    def check_seeds(self) -> None:
        """Stop recording if the step has set the state of torch's random generators.

        Setting it is not an op, so a program would not repeat it.
        """
        if not self.is_paused and self._seeds != generator_states():
            self.give_up(
                "the step sets the state of torch's random numbers (manual_seed, set_rng_state, "
                "fork_rng, or a checkpoint around random ops on plain tensors).\n"
                "  A program would draw other numbers.\n  Set it outside the step."
            )

    def _check_seeded_op(self, func: Any) -> None:
        self.check_seeds()
        if self.why is not None:
            raise CannotRecord(self.why)
        if draw.is_seeding():
            raise CannotRecord(
                f"{self.name}: at {user_line()}, {func} draws with a seed of its own, which a "
                "program would repeat.\n  Draw it outside the step, and pass it in."
            )

    def draws_in_segment(self) -> int:
        """Return how many draws this library's random ops made since the present segment began."""
        return generator.get_state().counter - self._segment_start.counter

    # -- calls that stay as they are ---------------------------------------------------------------

    def break_graph(self, run: Callable[[], Any], text: str, writes: Writes) -> Any:
        """Run ``run()`` without recording it, and end the segment of recorded ops: a graph break.

        Each run of the program calls ``run()`` there again.

        Args:
            text: description of the call, for ``show()``.
            writes: assignments since the previous graph break, which the program makes before
                ``run()``.
        """
        node = self.recorded.graph.call_function(GRAPH_BREAK, (len(self._break_calls),))
        self._break_calls.append(run)
        node.meta["text"], node.meta["where"] = text, user_line()
        node.meta["draws"], node.meta["writes"] = self.draws_in_segment(), writes
        with self.paused():
            out = run()
        # The draws of the next segment are counted from here.
        self._segment_start, self._seeds = generator.get_state(), generator_states()
        return out

    @property
    def break_calls(self) -> list[Any]:
        """The functions that run at graph breaks, in order."""
        return self._break_calls


def _without_recording(transport: Any) -> Any:
    return transport.inner if isinstance(transport, RecordingTransport) else transport
