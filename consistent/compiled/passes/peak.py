"""Computation of the memory in use at each op of a program, for passes that limit memory.

Only memory that the program allocates is counted: from the op that makes it to the last op that
reads it. Parameters, state and inputs exist before and after the program, and are not counted; nor
is the workspace that an op needs while it runs.
"""

from __future__ import annotations

from bisect import bisect_right
from typing import Any, NamedTuple

from ..program import GRAPH_BREAK
from .trace import Trace, memory_of


class Lifetime(NamedTuple):
    """Span in which one allocation (the memory of a value and its views) is held.

    It has the bytes, and the positions of the first and the last node that need the memory.
    """

    bytes: int
    first: int
    last: int


class MemoryUse:
    """Lifetimes of all memory that a graph allocates, and the peak of the bytes held.

    They are those of the graph of ``trace`` when this object is made; after a change of the graph,
    make a new one. ``memories`` maps ``memory_of`` a value to its lifetime, ``bytes`` is the peak
    in bytes, and ``peak`` the position of the node at which the peak is reached.
    """

    def __init__(self, trace: Trace) -> None:
        self.nodes = list(trace.graph.nodes)
        self.position_of = {node: i for i, node in enumerate(self.nodes)}
        self._writes: dict[Any, list[int]] = {}
        self._breaks = [i for i, node in enumerate(self.nodes) if node.target is GRAPH_BREAK]
        self.lasting_memories = {memory_of(node) for node in trace.lasting}
        self.input_memories = {memory_of(node) for node in self.nodes if node.op == "placeholder"}
        self.memories = self._lifetimes()
        self.bytes, self.peak = self._peak()

    def _lifetimes(self) -> dict[Any, Lifetime]:
        lifetimes: dict[Any, Lifetime] = {}
        for i, node in enumerate(self.nodes):
            for memory in node.meta.get("written", ()):
                self._writes.setdefault(memory, []).append(i)
            memory = memory_of(node)
            if memory is None or memory in self.input_memories or node.op != "call_function":
                continue
            # An item comes after the op that makes it.
            makers = [n for n in node.all_input_nodes if "shape" not in n.meta]
            # What is received is held from the start of its message.
            makers += [n.meta["started"] for n in makers if "started" in n.meta]
            first = min([i, *(self.position_of[n] for n in makers)])
            last = max([i, *(self.position_of[user] for user in node.users)])
            earlier = lifetimes.get(memory)
            if earlier is not None:
                first, last = min(first, earlier.first), max(last, earlier.last)
            size = max(node.meta.get("held", 0), earlier.bytes if earlier else 0)
            lifetimes[memory] = Lifetime(size, first, last)
        end = len(self.nodes)
        for memory, lifetime in lifetimes.items():
            # A value that is read after a graph break is an output of its segment, which the
            # program holds to its end.
            if memory in self.lasting_memories or self._breaks_between(
                lifetime.first, lifetime.last
            ):
                lifetimes[memory] = lifetime._replace(last=end)
        return lifetimes

    def _peak(self) -> tuple[int, int]:
        """Return (most bytes held at a time, position of the first node where they are held)."""
        # ``last`` can be len(nodes), for memory that is held to the end.
        changes = [0] * (len(self.nodes) + 2)
        for lifetime in self.memories.values():
            changes[lifetime.first] += lifetime.bytes
            changes[lifetime.last + 1] -= lifetime.bytes
        held_bytes = most = position = 0
        for i, change in enumerate(changes):
            held_bytes += change
            if held_bytes > most:
                most, position = held_bytes, i
        return most, position

    def bytes_at(self, i: int) -> int:
        """Return the bytes that are held while the node at position ``i`` runs."""
        return sum(x.bytes for x in self.memories.values() if x.first <= i <= x.last)

    def _breaks_between(self, first: int, last: int) -> bool:
        i = bisect_right(self._breaks, first)
        return i < len(self._breaks) and self._breaks[i] <= last

    def is_unchanged(self, memory: Any, first: int, last: int) -> bool:
        """Return whether ``memory`` has the same content at the positions ``first`` and ``last``.

        That is the case if nothing writes into it between them, and no graph break is between them.
        """
        if self._breaks_between(first, last):
            return False
        return not any(first < i < last for i in self._writes.get(memory, ()))

    @staticmethod
    def written_memories(trace: Trace) -> set[Any]:
        """Return ``memory_of`` of all values into which ops write."""
        return {m for node in trace.graph.nodes for m in node.meta.get("written", ())}

    def is_written(self, memory: Any) -> bool:
        """Return whether any op writes into ``memory``, which is the ``memory_of`` a value."""
        return memory in self._writes


def remove_dead(trace: Trace) -> None:
    """Remove ops whose results nothing reads, so that their memory is not counted.

    The program will not contain them either.
    """
    for node in reversed(list(trace.graph.nodes)):
        needed = node.users or node in trace.lasting or node.meta.get("written")
        is_op = node.op == "call_function" and node.target is not GRAPH_BREAK
        if is_op and not needed and not trace.is_ordered(node) and not node.is_impure():
            trace.graph.erase_node(node)
