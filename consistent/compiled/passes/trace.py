"""A recorded graph, with what a pass must know of it: which node writes into which memory, and
when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..opaque import MESSAGE, ORDERED, Call
from ..program import GRAPH_BREAK


@dataclass(frozen=True)
class Saved:
    """A message that a pass has removed.

    Args:
        text: text of the call.
        bytes: bytes that this rank would have sent.
        why: the pass that removed it, and the reason.
        where: the line of the program that sent it.
    """

    text: str
    bytes: int
    why: str
    where: str


@dataclass
class Trace:
    """A graph for the passes. Its nodes describe in ``meta``: "memory", the memory of the value;
    "written", the memories that the node writes into; "held", the bytes of the memory.

    Args:
        replaced: node -> the node that has its value now.
        lasting: values that the step returns or puts into places. What happens to them after the
            step is not visible here.
        keep_bytes: bytes that passes may keep alive at a time in addition to what the step keeps.
        held: bytes held at a time before any pass, if they are bounded.
        saved: messages that passes have removed.
        notes: what passes have done, for people.
    """

    graph: Graph
    calls: dict[int, Call]
    lasting: set[Node] = field(default_factory=set)
    keep_bytes: int = 16 << 20
    held: int = 0
    replaced: dict[Node, Node] = field(default_factory=dict)
    saved: list[Saved] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def positions(self) -> dict[Node, int]:
        """Return the position of each node in the graph."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def messages(self) -> list[Node]:
        """Return the messages that return new tensors."""
        return [node for node in self.graph.nodes if node.target is MESSAGE]

    def is_ordered(self, node: Node) -> bool:
        """Return whether all ranks must run the node in the same order."""
        return node.target in ORDERED

    def call(self, node: Node) -> Call:
        """Return the call of a message."""
        return self.calls[node.args[1]]  # type: ignore[index]

    def given(self, node: Node) -> list[Node]:
        """Return the nodes that a message sends."""
        return list(node.args[0])  # type: ignore[arg-type]

    def results(self, node: Node) -> dict[int, Node]:
        """Return the nodes of the message's results that are used, by index."""
        return {user.args[1]: user for user in node.users}  # type: ignore[misc]

    def is_written(self, memories: set[Any], first: Node, last: Node) -> bool:
        """Return whether any of ``memories`` may be written between two nodes. A call that runs as
        written may write into any memory."""
        node = first.next
        while node is not last:
            if node.target is GRAPH_BREAK or memories & node.meta.get("written", set()):
                return True
            node = node.next
        return False

    def is_own(self, memories: set[Any]) -> bool:
        """Return whether nothing writes into ``memories`` after they were made, inside the step or
        outside."""
        written = (node.meta.get("written", set()) for node in self.graph.nodes)
        escaped = {memory_of(node) for node in self.lasting}
        return not memories & escaped and not any(memories & each for each in written)

    def replace(self, old: Node, new: Node) -> None:
        """Use ``new`` wherever ``old`` was used."""
        old.replace_all_uses_with(new)
        self.replaced[old] = new
        if old in self.lasting:
            self.lasting.add(new)
        # Nodes that ``old`` had replaced now stand for ``new``, so lookups need one step.
        for node, other in self.replaced.items():
            if other is old:
                self.replaced[node] = new

    def leave_out(self, node: Node, why: str) -> None:
        """Remove a message whose results are no longer used."""
        call = self.call(node)
        self.saved.append(Saved(call.text, call.bytes, why, node.meta.get("where", "")))
        for item in list(node.users):
            self.graph.erase_node(item)
        self.graph.erase_node(node)


def memory_of(node: Any) -> Any:
    """Return the memory of a node's value."""
    return node.meta.get("memory")
