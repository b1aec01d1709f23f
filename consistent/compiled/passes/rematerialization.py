"""Rewrite that recomputes a value just before it is read again, instead of holding it until
then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from .peak import MemoryUse
from .trace import Trace, memory_of

_MAX_RECOMPUTED_OPS = 32  # ops that recompute one value


class Rematerialization:
    """Change of a graph that recomputes a value (and its views) for the later readers.

    The memory of the value can then be freed in between. The change is made at construction. If
    ``is_done`` is false, nothing was changed: an input of the recomputation is no longer held, or
    was written meanwhile. ``undo`` restores the graph.

    Args:
        memory_use: the lifetimes of the present graph.
        memory: ``memory_of`` the value to recompute.
        is_later: function that returns whether an op shall read the recomputed value.
        may_recompute: function that returns whether an op may run a second time.
    """

    def __init__(
        self,
        trace: Trace,
        memory_use: MemoryUse,
        memory: Any,
        is_later: Callable[[Node], bool],
        may_recompute: Callable[[Node], bool],
    ) -> None:
        self._trace, self._count, self._may_recompute = trace, memory_use, may_recompute
        self._memory = memory
        self._copies: dict[Node, Node] = {}
        self._new_memories: dict[Any, Any] = {}
        self._replaced_inputs: list[tuple[Node, Node, Node]] = []  # reader, before, after
        self._views: list[Node] = []
        self.is_done = self._recompute(is_later)

    def _recompute(self, is_later: Callable[[Node], bool]) -> bool:
        memory_use, memory = self._count, self._memory
        if memory in memory_use.lasting_memories or memory_use.is_written(memory):
            return False
        lifetime = memory_use.memories[memory]
        parts = [
            n
            for n in memory_use.nodes[lifetime.first : lifetime.last + 1]
            if memory_of(n) == memory
        ]
        views = [n for n in parts if is_later(n)]  # these become views of the recomputed memory
        parts = [n for n in parts if not is_later(n)]
        readers = [(n, user) for n in parts for user in n.users if is_later(user)]
        if not readers:
            return False
        # All copies are placed before the first of the later readers.
        first = min(readers, key=lambda pair: memory_use.position_of[pair[1]])[1]
        for node in dict.fromkeys(n for n, _ in readers):
            if self._copy_before(node, first) is None:
                self.undo()
                return False
        for node, user in readers:
            user.replace_input_with(node, self._copies[node])
            self._replaced_inputs.append((user, node, self._copies[node]))
        for node in views:
            node.meta["memory"] = self._new_memories[memory]
        self._views = views
        return True

    def _copy_before(self, node: Node, before: Node) -> Node | None:
        """Insert a copy of ``node`` before ``before``, with copies of its inputs as needed.

        Return the copy; None if an input can neither be read nor recomputed at that position.
        """
        if node in self._copies:
            return self._copies[node]
        if (
            node.op != "call_function"
            or not self._may_recompute(node)
            or len(self._copies) >= _MAX_RECOMPUTED_OPS
        ):
            return None
        input_copies: dict[Node, Node] = {}
        for x in node.all_input_nodes:
            input_copy = x if self._can_read(x, node, before) else self._copy_before(x, before)
            if input_copy is None:
                return None
            input_copies[x] = input_copy
        with self._trace.graph.inserting_before(before):
            copy = self._trace.graph.node_copy(node, input_copies.__getitem__)
        memory = memory_of(node)
        # A copy that is not a view of its inputs has memory of its own.
        if memory is not None and not any(memory_of(x) == memory for x in input_copies.values()):
            copy.meta["memory"] = self._new_memories.setdefault(memory, object())
        copy.meta["again"] = True
        self._copies[node] = copy
        return copy

    def _can_read(self, x: Node, reader: Node, before: Node) -> bool:
        """Return whether a copy of ``reader`` at the position of ``before`` can read ``x`` too.

        ``x`` must be held until there in any case, and still have the value that ``reader`` read.
        """
        memory_use, memory = self._count, memory_of(x)
        first, last = memory_use.position_of[reader], memory_use.position_of[before]
        if x.op in ("placeholder", "get_attr"):
            return memory_use.is_unchanged(memory, first, last)
        if (
            memory is None
            or memory == self._memory
            or not memory_use.is_unchanged(memory, first, last)
        ):
            return False
        return memory in memory_use.input_memories or memory_use.memories[memory].last >= last

    def undo(self) -> None:
        """Restore the graph as it was before this change."""
        for user, node, copy in reversed(self._replaced_inputs):
            user.replace_input_with(copy, node)
        # In reverse order, because a node can be erased only after the nodes that read it.
        for copy in reversed(self._copies.values()):
            self._trace.graph.erase_node(copy)
        for node in self._views:
            node.meta["memory"] = self._memory
        self._copies, self._replaced_inputs, self._views, self.is_done = {}, [], [], False
