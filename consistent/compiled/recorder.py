"""Recorder of a step while it runs: each op on shards, each message, and each random op.

The step runs as it otherwise would, so its results are those of an eager call. All ops below
autograd are recorded in an fx graph, in order, including those of backward and the optimizer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from mirrored.comm import Ranks
from mirrored.transports.base.unseen import unseen
from mirrored.transports.default import current, replace_current
from mirrored.transports.faults.place import user_line

from ..dispatch.planning.writes import written_tensors
from ..dispatch.plans.shards import is_global
from ..forms.random import draw, generator
from ..forms.seeds import signed
from ..graph.reads import are_whole
from ..nn.sharded import prefetch
from ..spec import TensorSpec
from ..spec.nested import map_tensors, tensors_in
from ..spec.tracer import Tracer
from .agreeing import Agreed, Heard, may_raise
from .errors import CannotRecord
from .memory import MemoryTable, geometry, has_memory, held_by, is_contiguous, storage_of
from .messages import Noting
from .opaque import DRAWN, MESSAGE, START, WAIT, OpaqueCall, shape_of
from .program import GRAPH_BREAK, Read
from .random_op import RandomOp
from .sources import Source

_aten = torch.ops.aten
_Off = torch._C.DisableTorchFunction
_LINES = 3  # lines of the step that are kept for a message
_READS = (_aten._local_scalar_dense.default, _aten.equal.default, _aten.is_nonzero.default)
_CONSTANTS = (_aten.lift_fresh.default, _aten.lift_fresh_copy.default)
_TO_PYTHON = frozenset(
    getattr(torch.Tensor, name)
    for name in ("tolist", "numpy", "__array__", "__dlpack__", "__bool__", "__float__", "__int__")
)


# These read the values of an argument in C++, without an op that a dispatch mode would see.
_SPLITS = (torch.tensor_split, torch.Tensor.tensor_split)


@dataclass(frozen=True)
class NodePlace:
    """Origin of a tensor that a step returns or assigns; one of three is given.

    It is used during the recording. The finished program has a ``program.Place`` instead, with a
    number in place of the node.

    Args:
        node: node of the value. With ``spec``, the value is a shard of a global tensor of this
            spec.
        argument: position of an argument of the step, which is itself the tensor.
        source: a ``Source`` whose tensor is the one.
    """

    node: Node | None
    spec: Any = None
    argument: int | None = None
    source: Any = None


Writes = list[tuple[Source, NodePlace | None]]  # assignments to sources; None assigns None


class Recorder(TorchDispatchMode):
    """Dispatch mode that records the ops of a step in the fx graph ``graph``.

    It keeps track of which node made the value of each tensor. If something cannot be recorded,
    ``why`` becomes the reason, and the step runs on unrecorded.

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
        self.graph = Graph()
        self.calls = calls
        self.reads: dict[Node, Read] = {}
        self.constants: dict[str, torch.Tensor] = {}
        self.memory = MemoryTable()
        self._fixed: set[Node] = set()  # values that depend on sizes and constants only
        self._changing: set[int] = set()  # storages into which other values were written
        self._seeds = _seeds()
        self._start = generator.get_state()
        self._boxing: tuple[TensorSpec, TensorSpec] | None = None
        self._paused = 0
        self._agreeing: list[Ranks] = []  # stack: ranks that will tell each other how an op went
        self._telling: list[Node] = []  # such ops, since the outermost agreement began
        self._objects: list[Any] = []
        self._kept: list[Any] = []

    # -- what is there before the step ------------------------------------------------------------

    def know(self, read: Read, x: torch.Tensor) -> None:
        """Register ``x`` as an input of the program; ``read`` tells how each run reads it.

        It becomes a placeholder of the graph only when an op uses it.
        """
        if self.memory.find(x) is None:
            self.memory.put(x, read)

    def node_of(self, x: torch.Tensor) -> Node:
        """Return the node that made the value of ``x``, or the placeholder by which it is read.

        Raises:
            CannotRecord: the recorder does not know where the tensor comes from.
        """
        found = self.memory.find(x)
        if isinstance(found, Read):
            return self._read(found, x)
        if found is not None:
            self._describe(found, x)  # again: a shard becomes global only after its op
            return found
        base = self.memory.base(x)
        if base is not None:
            whole = self._read(base, None) if isinstance(base, Read) else base
            with _Off():
                offset, size, stride, *_ = geometry(x)
                where = (list(size), list(stride), offset)
            node = self._add(_aten.as_strided.default, (whole, *where), {})
            self.memory.put(x, node)
            return node
        raise CannotRecord(
            f"{self.name}: at {user_line()}, a tensor of shape {tuple(x.shape)} is used that is "
            "neither an argument, nor a parameter, buffer or optimizer state that can be found "
            "from the step, nor the result of an op.\n  A program could not find it again.\n"
            "  Pass it to the step as an argument, or register it as a buffer."
        )

    def _read(self, read: Read, x: torch.Tensor | None) -> Node:
        node = self.graph.placeholder(f"read_{len(self.reads)}")
        self.reads[node] = read
        self.memory.put(read.x if x is None else x, node)
        self._describe(node, read.x if x is None else x)
        return node

    def keep(self, x: Any) -> None:
        """Keep ``x`` alive as long as the recorder, because the recording refers to its memory."""
        self._kept.append(x)

    @property
    def is_paused(self) -> bool:
        """Return whether recording is paused, so that what runs now is not noted."""
        return self._paused > 0

    def refuse(self, why: str) -> None:
        """Give up the program, for the reason ``why``.

        The step runs on as written, and no more of it is recorded.
        """
        self._fail(CannotRecord(f"{self.name}: at {user_line() or 'its end'}, {why}"))

    def _fail(self, error: CannotRecord) -> None:
        if self.why is None:
            self.why = str(error)
            self._paused += 1  # never undone: nothing more is recorded
            _tell_compiling(False)

    def found(self, x: torch.Tensor) -> Node | None:
        """Return ``node_of(x)``; if the origin of ``x`` is unknown, return None and give up.

        Giving up means that the step gets no program, and runs on unrecorded.
        """
        if self.why is not None:
            return None
        try:
            return self.node_of(x)
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
                watch_writes=self._watch_writes,
            )
            stack.enter_context(tracer.tracing())
            stack.enter_context(prefetch.switched_off())
            stack.enter_context(_Reading(self))
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
                _tell_compiling(False)

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
            return self._constant(func, args, kwargs)
        if func.namespace == "profiler":
            return func(*args, **kwargs)
        nodes = {id(x): self.node_of(x) for x in tensors_in((args, kwargs))}
        fixed = all(map(self._is_fixed, nodes.values()))
        if not fixed:
            self._refuse_reading(func, args)
        _check_printable(self.name, func, (args, kwargs))
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
            ranks = ()  # the condition is the same on all ranks, so they need not tell each other
        if ranks is not None and may_raise(func):
            if not any(x.is_meta for x in tensors_in((args, kwargs))):
                return self._agreed(func, args, kwargs, ranks)
            # Meta tensors: this rank is outside the placement, and only hears how the op went.
            self._message(Heard(func, ranks).call(), [], [])
        out = func(*args, **kwargs)
        if seeded:
            self._seeds = _seeds()
        if func in _READS:
            return out
        if func.is_view and isinstance(out, torch.Tensor) and self.memory.find(out) is not None:
            return out  # such as detach(x): the same memory is the same value
        self._note(func, args, kwargs, out, nodes, fixed)
        return out

    def _note(
        self,
        func: Any,
        args: tuple,
        kwargs: dict[str, Any],
        out: Any,
        nodes: dict[int, Node],
        fixed: bool,
    ) -> None:
        """Add the op ``func``, which has run and returned ``out``, to the graph.

        Args:
            nodes: id of each tensor among the arguments -> the node that made its value.
            fixed: whether the results are the same in all calls of the step.
        """
        node = self._add(func, *map_tensors((args, kwargs), lambda x: nodes[id(x)]))
        if fixed and not func._schema.is_mutable:
            self._fixed.add(node)
        written = {storage_of(x) for x in written_tensors(func, args, kwargs) if has_memory(x)}
        if written:
            node.meta["written"] = written
            if not fixed:
                self._changing |= written
        self._results(node, func, out)

    def _add(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Node:
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["where"] = user_line()
        return node

    def _results(self, node: Node, func: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            # An in-place op returns its target, whose memory keeps the node that it has.
            if self.memory.find(out) is None or not func._schema.is_mutable:
                self.memory.put(out, node)
            self._describe(node, out)
        elif isinstance(out, list | tuple):
            for i, x in enumerate(out):
                if isinstance(x, torch.Tensor) and (
                    self.memory.find(x) is None or not func._schema.is_mutable
                ):
                    item = self.graph.call_function(_item, (node, i))
                    if node in self._fixed:
                        self._fixed.add(item)
                    self.memory.put(x, item)
                    self._describe(item, x)

    def _watch_writes(self, x: torch.Tensor) -> Callable[[], bool]:
        memory, last = storage_of(x), next(iter(reversed(self.graph.nodes)), None)

        def is_written() -> bool:
            since = takewhile(lambda node: node is not last, reversed(self.graph.nodes))
            return any(memory in node.meta.get("written", ()) for node in since)

        return is_written

    def _describe(self, node: Node, x: torch.Tensor) -> None:
        node.meta["shape"], node.meta["dtype"], node.meta["device"] = shape_of(x)
        node.meta["memory"] = storage_of(x) if has_memory(x) else id(x)
        node.meta["held"], node.meta["contiguous"] = held_by(x), is_contiguous(x)
        if is_global(x):
            node.meta["spec"] = x._spec  # type: ignore[attr-defined]

    def _constant(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        (x,) = args
        out = func(x, **kwargs)
        if self.memory.find(x) is not None:
            node = self._add(_aten.clone.default, (self.node_of(x),), {})
        else:
            name = f"constant_{len(self.constants)}"
            # A clone, because the step may write into ``x`` later.
            self.constants[name] = x.detach().clone()
            node = self.graph.get_attr(name)
            node = self._add(_aten.clone.default, (node,), {})
            self._fixed.add(node)
        self.memory.put(out, node)
        self._describe(node, out)
        return out

    def check_read(self, x: torch.Tensor, what: str) -> None:
        """Give up the program if Python reads values of ``x`` that may differ from run to run.

        Called when a method such as ``tolist()`` is about to read them; ``what`` is its name.
        """
        with _Off():
            found = self.memory.find(x)
        if not isinstance(found, Node) or not self._is_fixed(found):
            self._fail(CannotRecord(_reads(self.name, what)))

    def _is_fixed(self, node: Node) -> bool:
        return node in self._fixed and node.meta.get("memory") not in self._changing

    def _refuse_reading(self, func: Any, args: tuple) -> None:
        tags = func.tags
        if func in _READS or torch.Tag.data_dependent_output in tags:
            raise CannotRecord(_reads(self.name, str(func)))
        by_value = torch.Tag.dynamic_output_shape in tags and not self._sized_by_fixed(func, args)
        # Only masks among its indices make the shape of index.Tensor depend on values.
        if by_value and func is _aten.index.Tensor:
            by_value = any(x.dtype in (torch.bool, torch.uint8) for x in tensors_in(args[1]))
        if by_value:
            raise CannotRecord(
                f"{self.name}: at {user_line()}, the result of {func} has a shape that depends on "
                "values.\n  A program has one shape for each of its values.\n"
                "  Use torch.where or a mask in place of a selection, or leave that part out of "
                "the compiled step."
            )

    def _sized_by_fixed(self, func: Any, args: tuple) -> bool:
        """Return whether a result whose shape depends on values has the same shape in all runs.

        That holds for a torch op if each integer or bool operand, such as the mask in ``x[mask]``,
        was itself computed from sizes and constants only. For ops of other libraries, False.
        """
        if func.namespace != "aten":
            return False
        deciding = [x for x in tensors_in(args) if are_whole(x.dtype)]
        return bool(deciding) and all(self._is_fixed(self.node_of(x)) for x in deciding)

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
            node = self._add(MESSAGE, (nodes, call.number), {})
            self._mark(node, call)
            for i, x in enumerate(results):
                item = self.graph.call_function(_item, (node, i))
                self.memory.put(x, item)
                self._describe(item, x)

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
            node = self._add(op, (found, call.number), {})
            node.meta["written"] = {storage_of(x)}
            self._changing.add(storage_of(x))
            self._mark(node, call)

    # -- ops that may raise on some ranks alone ----------------------------------------------------

    def _agrees(self, ranks: Ranks, begins: bool) -> None:
        # Agreements nest if ranks outside the placement are also told. The outermost ranks include
        # all others, so they tell each other once for all.
        self._agreeing = [*self._agreeing, ranks] if begins else self._agreeing[:-1]
        if len(self._agreeing) == 1 and begins or not self._agreeing:
            self._telling = []

    def _tells(self, ranks: Ranks) -> bool:
        """Return whether the next message of ``ranks`` can report whether the ops before it raised.

        Called by the transport wrapper before a sum that could carry the report. If so, the
        recorded ``Agreed`` ops whose errors ``ranks`` exchange here are changed to send nothing
        unless they raise.
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

        In a program, all these ranks raise after that message if one of them met an error.
        """
        op, given = Agreed(func, args, kwargs, ranks), tensors_in((args, kwargs))
        out = func(*args, **kwargs)
        results = op.results(out, given)
        if op.writes:
            results = [results[0].clone(memory_format=torch.contiguous_format)]
        self._message(op.call(results), given, results)
        if self._paused:
            return out
        self._telling.append(self.node_of(results[0]).args[0])  # type: ignore[arg-type]
        if not op.writes:
            made = iter(results)
            return map_tensors(out, lambda _: next(made))
        copied = self._add(
            _aten.copy_.default, (self.node_of(given[0]), self.node_of(results[0])), {}
        )
        copied.meta["written"] = {storage_of(given[0])}
        self._changing.add(storage_of(given[0]))
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
        nodes = [self.node_of(x) for x in tensors_in(values)]
        out = func(*args, **kwargs)
        filled = func._schema.is_mutable
        made = [values[0]] if filled else [out]
        call = OpaqueCall(
            f"{func} {offset} {map_tensors(values[: at - 1], shape_of)!r} {values[at + 1 :]!r}",
            RandomOp(func, values, at, offset, filled),
            tuple(map(shape_of, made)),
        )
        self.calls[call.number] = call
        node = self._add(DRAWN, (nodes, self._key(), call.number), {})
        item = self.graph.call_function(_item, (node, 0))
        if filled:
            copied = self._add(_aten.copy_.default, (nodes[0], item), {})
            copied.meta["written"] = {storage_of(values[0])}
            self._changing.add(storage_of(values[0]))
        else:
            self.memory.put(out, item)
            self._describe(item, out)
        return out

    def _key(self) -> Node:
        for node, read in self.reads.items():
            if read.kind == "key" and read.segment == self._segment():
                return node
        node = self.graph.placeholder(f"key_{len(self.reads)}")
        self.reads[node] = Read("key", segment=self._segment())
        return node

    def _segment(self) -> int:
        return sum(node.target is GRAPH_BREAK for node in self.graph.nodes)

    def check_seeds(self) -> None:
        """Give up the program if the step has set the state of torch's random generators.

        Setting it is not an op, so a program would not repeat it.
        """
        if not self.is_paused and self._seeds != _seeds():
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

    def break_graph(
        self, run: Callable[[], Any], text: str, writes: list[tuple[Source, NodePlace | None]]
    ) -> Any:
        """Run ``run()`` without recording it, and end the segment of recorded ops: a graph break.

        Each run of the program calls ``run()`` there again.

        Args:
            text: description of the call, for ``show()``.
            writes: assignments since the previous graph break, which the program makes before
                ``run()``.
        """
        node = self.graph.call_function(GRAPH_BREAK, (len(self._objects),))
        self._objects.append(run)
        node.meta["text"], node.meta["where"] = text, user_line()
        node.meta["draws"], node.meta["writes"] = self.drawn(), writes
        with self.paused():
            out = run()
        # The draws of the next segment are counted from here.
        self._start, self._seeds = generator.get_state(), _seeds()
        return out

    @property
    def objects(self) -> list[Any]:
        """The functions that run at graph breaks, in order."""
        return self._objects


@contextmanager
def compiling(value: bool) -> Iterator[None]:
    """Make ``torch.compiler.is_compiling()`` return ``value`` inside the block.

    Many programs skip checks of values if it is true.
    """
    before = torch.compiler._is_compiling_flag  # type: ignore[attr-defined]
    _tell_compiling(value)
    try:
        yield
    finally:
        _tell_compiling(before)


def _tell_compiling(value: bool) -> None:
    torch.compiler._is_compiling_flag = value  # type: ignore[attr-defined]


_PRINTED = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def _check_printable(name: str, func: Any, given: Any) -> None:
    """Raise CannotRecord if an argument of the op ``func`` has no text form.

    A program is kept as text, so it cannot hold such an argument, like a process group or a
    generator.
    """
    if isinstance(given, dict):
        given = list(given.values())
    if isinstance(given, list | tuple):
        for x in given:
            _check_printable(name, func, x)
    elif not isinstance(given, (*_PRINTED, torch.memory_format, torch.Tensor, slice)):
        raise CannotRecord(
            f"{name}: at {user_line()}, {func} is given a {type(given).__name__}, which a program "
            "cannot hold.\n  Use collectives of torch.distributed and generators of your own "
            "outside a compiled step."
        )


def _seeds() -> bytes:
    """Return the states of torch's random generators, as bytes to compare.

    If they change other than by a random op, the step has set them. The bits in which this library
    keeps its own count of draws are left out.
    """
    with unseen():
        words = torch.default_generator.get_state().view(torch.int64)
        found = (words & 0xFFFF_FFFF).numpy().tobytes()
        if torch.cuda.is_initialized():
            states = (g.get_state().numpy().tobytes() for g in torch.cuda.default_generators)
            found = b"".join([found, *states])
        return found


def _item(values: Any, i: int) -> Any:
    return values[i]


def _inner(transport: Any) -> Any:
    return transport.inner if isinstance(transport, Noting) else transport


def _reads(name: str, what: str) -> str:
    return (
        f"{name}: at {user_line()}, {what} reads a value that the step computes.\n"
        "  What Python does with it would be done with the values of one step only.\n"
        "  Return it from the step and read it outside, or use torch.where in place of `if`."
    )


class _Reading(TorchFunctionMode):
    """Torch function mode that detects when Python reads values of plain tensors without an op.

    ``x.tolist()`` is an example. The recorder then checks whether the values may differ in other
    runs.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(
        self, func: Any, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if not self._recorder.is_paused:
            if func in _TO_PYTHON:
                self._recorder.check_read(args[0], func.__name__)
            elif func in _SPLITS and len(args) > 1 and isinstance(args[1], torch.Tensor):
                self._recorder.check_read(args[1], func.__name__)
        return func(*args, **(kwargs or {}))
