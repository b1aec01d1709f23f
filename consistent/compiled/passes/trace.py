"""A recorded graph, and what a pass has to know of it: who writes into which memory, and when."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..opaque import MESSAGE, ORDERED, Call
from ..program import GRAPH_BREAK


@dataclass(frozen=True)
class Saved:
    """A message that is not sent any more.

    Args:
        text: what it was.
        bytes: what this rank would have sent.
        why: which pass left it out, and why it may.
        where: the line of the program that sent it.
    """

    text: str
    bytes: int
    why: str
    where: str


@dataclass
class Trace:
    """A graph whose nodes say in ``meta``: "memory", that of their value; "written", the memories
    that they write into; "held": the bytes of the memory.

    Args:
        replaced: node -> the one that has its value now.
        lasting: values that the caller of the step gets, or a place that lasts: what is done with
            them afterwards is not seen here.
        keep_bytes: how much more may be kept alive at a time than the step itself keeps.
        held: bytes that it held at a time before any pass, if they are bounded.
        saved: messages that are not sent any more.
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
        """The place of each node in the order of the graph."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def messages(self) -> list[Node]:
        """The messages that give new tensors."""
        return [node for node in self.graph.nodes if node.target is MESSAGE]

    def is_ordered(self, node: Node) -> bool:
        """Whether all ranks do it in one order."""
        return node.target in ORDERED

    def call(self, node: Node) -> Call:
        """What a message does."""
        return self.calls[node.args[1]]  # type: ignore[index]

    def given(self, node: Node) -> list[Node]:
        """What a message sends."""
        return list(node.args[0])  # type: ignore[arg-type]

    def results(self, node: Node) -> dict[int, Node]:
        """The node of each of its results that is used, by number."""
        return {user.args[1]: user for user in node.users}  # type: ignore[misc]

    def is_written(self, memories: set[Any], first: Node, last: Node) -> bool:
        """Whether any of ``memories`` is written between two nodes; a call that runs as it is
        written may write into any."""
        node = first.next
        while node is not last:
            if node.target is GRAPH_BREAK or memories & node.meta.get("written", set()):
                return True
            node = node.next
        return False

    def is_own(self, memories: set[Any]) -> bool:
        """Whether nobody writes into ``memories`` after they were made, inside or outside."""
        written = (node.meta.get("written", set()) for node in self.graph.nodes)
        escaped = {memory_of(node) for node in self.lasting}
        return not memories & escaped and not any(memories & each for each in written)

    def replace(self, old: Node, new: Node) -> None:
        """Use ``new`` wherever ``old`` was used."""
        old.replace_all_uses_with(new)
        self.replaced[old] = new
        if old in self.lasting:
            self.lasting.add(new)
        for node, other in self.replaced.items():
            if other is old:
                self.replaced[node] = new

    def leave_out(self, node: Node, why: str) -> None:
        """Do not send a message whose results are not used any more."""
        call = self.call(node)
        self.saved.append(Saved(call.text, call.bytes, why, node.meta.get("where", "")))
        for item in list(node.users):
            self.graph.erase_node(item)
        self.graph.erase_node(node)


def memory_of(node: Any) -> Any:
    """The memory of a node's value."""
    return node.meta.get("memory")
