"""The fx graph of a step while it is recorded: which node made the value of which tensor."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any

import torch
from torch.fx import Graph, Node

from mirrored.transports.faults.place import user_line

from ..dispatch.planning.writes import written_tensors
from ..dispatch.plans.shards import is_global
from ..spec.nested import map_tensors
from .errors import CannotRecord
from .memory import MemoryTable, geometry, has_memory, is_contiguous, storage_bytes, storage_of
from .opaque import shape_of
from .program import Read

_aten = torch.ops.aten
_DisableTorchFunction = torch._C.DisableTorchFunction


class RecordedGraph:
    """Graph of the ops that a step has run so far, and the table of the tensors that they made.

    Args:
        name: name of the step in messages.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.graph = Graph()
        self.reads: dict[Node, Read] = {}  # placeholder -> how each run reads its value
        self.constants: dict[str, torch.Tensor] = {}
        self.memory = MemoryTable()
        self._fixed_nodes: set[Node] = set()  # values that depend on sizes and constants only
        self._varying_storages: set[int] = set()  # storages into which ops wrote values that vary
        self._kept_alive: list[Any] = []

    def add_input(self, read: Read, x: torch.Tensor) -> None:
        """Register ``x`` as an input of the program; ``read`` says how each run reads it.

        It becomes a placeholder of the graph only when an op uses it.
        """
        if self.memory.find(x) is None:
            self.memory.put(x, read)

    def node_of(self, x: torch.Tensor) -> Node:
        """Return the node that computes ``x``, or the placeholder if ``x`` is an input.

        Raises:
            CannotRecord: the recorder does not know where the tensor comes from.
        """
        value = self.memory.find(x)
        if isinstance(value, Read):
            return self._add_placeholder(value, x)
        if value is not None:
            self._set_metadata(value, x)  # again: a shard becomes global only after its op
            return value
        base = self.memory.base(x)
        if base is not None:
            base_node = self._add_placeholder(base, None) if isinstance(base, Read) else base
            with _DisableTorchFunction():
                offset, size, stride, *_ = geometry(x)
                strided_args = (list(size), list(stride), offset)
            node = self.add(_aten.as_strided.default, (base_node, *strided_args), {})
            self.memory.put(x, node)
            return node
        raise CannotRecord(
            f"{self.name}: at {user_line()}, a tensor of shape {tuple(x.shape)} is used that is "
            "neither an argument, nor a parameter, buffer or optimizer state that can be found "
            "from the step, nor the result of an op.\n  A program could not find it again.\n"
            "  Pass it to the step as an argument, or register it as a buffer."
        )

    def _add_placeholder(self, read: Read, x: torch.Tensor | None) -> Node:
        node = self.graph.placeholder(f"read_{len(self.reads)}")
        self.reads[node] = read
        self.memory.put(read.x if x is None else x, node)
        self._set_metadata(node, read.x if x is None else x)
        return node

    def keep_alive(self, x: Any) -> None:
        """Keep ``x`` alive as long as the recorder, because the recording refers to its memory."""
        self._kept_alive.append(x)

    def add_op(
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
        node = self.add(func, *map_tensors((args, kwargs), lambda x: nodes[id(x)]))
        if fixed and not func._schema.is_mutable:
            self._fixed_nodes.add(node)
        written = [x for x in written_tensors(func, args, kwargs) if has_memory(x)]
        if written:
            self.note_writes(node, written, fixed)
        self._record_results(node, func, out)

    def add(self, target: Any, args: tuple, kwargs: dict[str, Any]) -> Node:
        """Append the call ``target(*args, **kwargs)``, whose tensors are nodes; return its node."""
        node = self.graph.call_function(target, tuple(args), kwargs)
        node.meta["where"] = user_line()
        return node

    def note_writes(self, node: Node, targets: Iterable[torch.Tensor], fixed: bool = False) -> None:
        """Note that the op ``node`` writes into the memory of ``targets``.

        ``fixed`` says that it writes the same values in all calls of the step.
        """
        node.meta["written"] = {storage_of(x) for x in targets}
        if not fixed:
            self._varying_storages |= node.meta["written"]

    def overwrite(self, x: torch.Tensor, value: Node) -> None:
        """Append ``x.copy_(value)``, for an in-place op on ``x`` that is recorded out of place."""
        self.note_writes(self.add(_aten.copy_.default, (self.node_of(x), value), {}), [x])

    def add_item(self, node: Node, i: int, x: torch.Tensor | None = None) -> Node:
        """Append and return a ``getitem`` node for the result number ``i`` of ``node``.

        ``x`` is the tensor with this result; None if no tensor of the step has the result.
        """
        item = self.graph.call_function(operator.getitem, (node, i))
        if node in self._fixed_nodes:
            self._fixed_nodes.add(item)
        if x is not None:
            self.memory.put(x, item)
            self._set_metadata(item, x)
        return item

    def _record_results(self, node: Node, func: Any, out: Any) -> None:
        if isinstance(out, torch.Tensor):
            # An in-place op returns its target, whose memory keeps the node that it has.
            if self.memory.find(out) is None or not func._schema.is_mutable:
                self.memory.put(out, node)
            self._set_metadata(node, out)
        elif isinstance(out, list | tuple):
            for i, x in enumerate(out):
                if isinstance(x, torch.Tensor) and (
                    self.memory.find(x) is None or not func._schema.is_mutable
                ):
                    self.add_item(node, i, x)

    def watch_writes(self, x: torch.Tensor) -> Callable[[], bool]:
        """Return a function that returns whether an op has modified ``x`` since this call."""
        memory, last = storage_of(x), next(iter(reversed(self.graph.nodes)), None)

        def is_written() -> bool:
            since = takewhile(lambda node: node is not last, reversed(self.graph.nodes))
            return any(memory in node.meta.get("written", ()) for node in since)

        return is_written

    def _set_metadata(self, node: Node, x: torch.Tensor) -> None:
        node.meta["shape"], node.meta["dtype"], node.meta["device"] = shape_of(x)
        node.meta["memory"] = storage_of(x) if has_memory(x) else id(x)
        node.meta["held"], node.meta["contiguous"] = storage_bytes(x), is_contiguous(x)
        if is_global(x):
            node.meta["spec"] = x._spec  # type: ignore[attr-defined]

    def record_constant(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run and record ``lift_fresh``, by which a tensor of Python data enters the step."""
        (x,) = args
        out = func(x, **kwargs)
        if self.memory.find(x) is not None:
            node = self.add(_aten.clone.default, (self.node_of(x),), {})
        else:
            name = f"constant_{len(self.constants)}"
            # A clone, because the step may modify ``x`` later.
            self.constants[name] = x.detach().clone()
            node = self.graph.get_attr(name)
            node = self.add(_aten.clone.default, (node,), {})
            self._fixed_nodes.add(node)
        self.memory.put(out, node)
        self._set_metadata(node, out)
        return out

    def is_fixed(self, node: Node) -> bool:
        """Return whether the value of ``node`` is the same in all calls of the step.

        It is if it depends on sizes and constants only, and nothing else is written into it.
        """
        return node in self._fixed_nodes and node.meta.get("memory") not in self._varying_storages
