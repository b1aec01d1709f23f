"""Rewrite that recomputes a value just before it is read again, instead of holding it until
then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.fx import Node

from .peak import Count
from .trace import Trace, memory_of

_MOST = 32  # ops that recompute one value


class Rematerialization:
    """Change of a graph that recomputes a value (and its views) for the later readers.

    The memory of the value can then be freed in between. The change is made at construction. If
    ``is_done`` is false, nothing was changed: an input of the recomputation is no longer held, or
    was written meanwhile. ``undo`` restores the graph.

    Args:
        count: the lifetimes of the present graph.
        memory: ``memory_of`` the value to recompute.
        later: function that returns whether an op shall read the recomputed value.
        may: function that returns whether an op may run a second time.
    """

    def __init__(
        self,
        trace: Trace,
        count: Count,
        memory: Any,
        later: Callable[[Node], bool],
        may: Callable[[Node], bool],
    ) -> None:
        self._trace, self._count, self._may = trace, count, may
        self._memory = memory
        self._made: dict[Node, Node] = {}
        self._fresh: dict[Any, Any] = {}
        self._changed: list[tuple[Node, Node, Node]] = []  # reader, before, after
        self._views: list[Node] = []
        self.is_done = self._done(later)

    def _done(self, later: Callable[[Node], bool]) -> bool:
        count, memory = self._count, self._memory
        if memory in count.kept or count.is_written(memory):
            return False
        held = count.memories[memory]
        parts = [n for n in count.nodes[held.first : held.last + 1] if memory_of(n) == memory]
        views = [n for n in parts if later(n)]  # these become views of the recomputed memory
        parts = [n for n in parts if not later(n)]
        readers = [(n, user) for n in parts for user in n.users if later(user)]
        if not readers:
            return False
        # All copies are placed before the first of the later readers.
        first = min(readers, key=lambda pair: count.at[pair[1]])[1]
        for node in dict.fromkeys(n for n, _ in readers):
            if self._copy(node, first) is None:
                self.undo()
                return False
        for node, user in readers:
            user.replace_input_with(node, self._made[node])
            self._changed.append((user, node, self._made[node]))
        for node in views:
            node.meta["memory"] = self._fresh[memory]
        self._views = views
        return True

    def _copy(self, node: Node, before: Node) -> Node | None:
        """Insert a copy of ``node`` before ``before``, with copies of its inputs as needed.

        Return the copy; None if an input can neither be read nor recomputed at that position.
        """
        if node in self._made:
            return self._made[node]
        if node.op != "call_function" or not self._may(node) or len(self._made) >= _MOST:
            return None
        given: dict[Node, Node] = {}
        for x in node.all_input_nodes:
            found = x if self._is_there(x, node, before) else self._copy(x, before)
            if found is None:
                return None
            given[x] = found
        with self._trace.graph.inserting_before(before):
            made = self._trace.graph.node_copy(node, given.__getitem__)
        memory = memory_of(node)
        # A copy that is not a view of its inputs has memory of its own.
        if memory is not None and not any(memory_of(x) == memory for x in given.values()):
            made.meta["memory"] = self._fresh.setdefault(memory, object())
        made.meta["again"] = True
        self._made[node] = made
        return made

    def _is_there(self, x: Node, reader: Node, before: Node) -> bool:
        """Return whether a copy of ``reader`` at the position of ``before`` can read ``x`` too.

        ``x`` must be held until there in any case, and still have the value that ``reader`` read.
        """
        count, memory = self._count, memory_of(x)
        first, last = count.at[reader], count.at[before]
        if x.op in ("placeholder", "get_attr"):
            return count.is_same(memory, first, last)
        if memory is None or memory == self._memory or not count.is_same(memory, first, last):
            return False
        return memory in count.given or count.memories[memory].last >= last

    def undo(self) -> None:
        """Restore the graph as it was before this change."""
        for user, node, made in reversed(self._changed):
            user.replace_input_with(made, node)
        # In reverse order, because a node can be erased only after the nodes that read it.
        for made in reversed(self._made.values()):
            self._trace.graph.erase_node(made)
        for node in self._views:
            node.meta["memory"] = self._memory
        self._made, self._changed, self._views, self.is_done = {}, [], [], False
