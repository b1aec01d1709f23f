"""Recorded graph as passes see it, with the information which node writes into which memory."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch.fx import Graph, Node

from ..opaque import MESSAGE, ORDERED_OPS, OpaqueCall
from ..program import GRAPH_BREAK


@dataclass(frozen=True)
class RemovedMessage:
    """Record of a message that a pass has removed, for ``show()`` and reports.

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
    """Recorded graph on which the passes work, and what they note about it.

    Each node has in ``meta``: "memory", an identifier of the memory of its value; "written", the
    memories into which the node writes; "held", the bytes of its memory.

    Args:
        graph: the nodes of all segments, with graph breaks between them.
        calls: recorded messages and random ops by number; passes add the calls that they make.
        replaced: removed node -> the node that now has its value.
        lasting: nodes whose values the step returns or assigns, such as new gradients. They outlive
            the step, so what is done with them is not visible here.
        keep_bytes: bytes that passes may keep alive at a time in addition to what the step keeps.
        held: peak of the bytes held before any pass, if the option ``memory`` is set.
        saved: messages that passes have removed.
        notes: sentences about what passes have done, for ``show()``.
    """

    graph: Graph
    calls: dict[int, OpaqueCall]
    lasting: set[Node] = field(default_factory=set)
    keep_bytes: int = 16 << 20
    held: int = 0
    replaced: dict[Node, Node] = field(default_factory=dict)
    saved: list[RemovedMessage] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def positions(self) -> dict[Node, int]:
        """Return the position of each node in the present order of the graph."""
        return {node: i for i, node in enumerate(self.graph.nodes)}

    def messages(self) -> list[Node]:
        """Return the nodes of messages in order, except those with a separate start and wait."""
        return [node for node in self.graph.nodes if node.target is MESSAGE]

    def is_ordered(self, node: Node) -> bool:
        """Return whether the node is a message, or the start or wait of one.

        All ranks must run these in the same order, or they deadlock.
        """
        return node.target in ORDERED_OPS

    def call(self, node: Node) -> OpaqueCall:
        """Return the recorded ``OpaqueCall`` of a message's node."""
        return self.calls[node.args[1]]  # type: ignore[index]

    def inputs(self, node: Node) -> list[Node]:
        """Return the nodes whose values a message sends."""
        return list(node.args[0])  # type: ignore[arg-type]

    def results(self, node: Node) -> dict[int, Node]:
        """Return the results of a message that ops read: index of a result -> ``getitem`` node."""
        return {user.args[1]: user for user in node.users}  # type: ignore[misc]

    def is_written(self, memories: set[Any], first: Node, last: Node) -> bool:
        """Return whether an op between ``first`` and ``last`` may write into any of ``memories``.

        They are results of ``memory_of``. A call at a graph break may write into any memory.
        """
        node = first.next
        while node is not last:
            if node.target is GRAPH_BREAK or memories & node.meta.get("written", set()):
                return True
            node = node.next
        return False

    def is_unwritten(self, memories: set[Any]) -> bool:
        """Return whether no op writes into ``memories``, which are results of ``memory_of``.

        Values that outlive the step may be written into after it, so they count as written.
        """
        written = (node.meta.get("written", set()) for node in self.graph.nodes)
        escaped = {memory_of(node) for node in self.lasting}
        return not memories & escaped and not any(
            memories & memories_written for memories_written in written
        )

    def replace(self, old: Node, new: Node) -> None:
        """Use the value of node ``new`` wherever that of ``old`` was used."""
        old.replace_all_uses_with(new)
        self.replaced[old] = new
        if old in self.lasting:
            self.lasting.add(new)
        # Nodes that ``old`` had replaced now stand for ``new``, so lookups need one step.
        for node, replacement in self.replaced.items():
            if replacement is old:
                self.replaced[node] = new

    def remove_message(self, node: Node, why: str) -> None:
        """Remove a message whose results are no longer used; ``why`` is the reason for reports."""
        call = self.call(node)
        self.saved.append(RemovedMessage(call.text, call.bytes, why, node.meta.get("where", "")))
        for item in list(node.users):
            self.graph.erase_node(item)
        self.graph.erase_node(node)


def memory_of(node: Any) -> Any:
    """Return the identifier of the memory of a node's value; None if the node has no tensor value.

    Views of one tensor have the same identifier.
    """
    return node.meta.get("memory")
