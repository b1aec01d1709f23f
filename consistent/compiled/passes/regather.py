"""Saving of memory by gathering again: a gathered value is freed, and gathered a second time where
it is read again, such as in backward.

```
%3 = all_gather(%1)                %3 = all_gather(%1)
%4 = mm(%2, %3)            -->     %4 = mm(%2, %3)
...                                ...                  %3 is not held here
%8 = mm(%7, t(%3))                 %9 = all_gather(%1)
                                   %8 = mm(%7, t(%9))
```

A gather is a message of several ranks, so they decide together (``bound_memory.py``). A repetition
is identified by two numbers that are the same on all ranks: the position of the gather among the
messages, and how many messages are before the first op that reads its result again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch.fx import Node

from ..opaque import MESSAGE
from .peak import MemoryUse
from .rematerialization import Rematerialization
from .rematerialize import held_for_later, is_cheap
from .trace import Trace, memory_of


class Repetition(NamedTuple):
    """Description of a gather to repeat, by which all ranks find it in their own graphs.

    Args:
        number: position of the gather among all messages.
        after: ops that come after this many messages read the result of the repeated gather.
        count: number of all messages, to check that the graphs of ranks correspond.
        kind: kind of the message, for the same check.
    """

    number: int
    after: int
    count: int
    kind: str


def propose_repetitions(trace: Trace, most: int) -> list[Repetition]:
    """Return the gathers that this rank would have to repeat to hold at most ``most`` bytes.

    It proposes as few as possible, for the present peak only. Nothing is changed: all ranks decide
    together.
    """
    use = MemoryUse(trace)
    messages, message_counts = _messages(trace, use)
    if use.bytes <= most or use.peak >= len(use.nodes):
        return []
    numbers = {node: i for i, node in enumerate(messages)}
    repetitions: list[Repetition] = []
    excess = use.bytes - most
    for memory in held_for_later(use):
        lifetime = use.memories[memory]
        source = use.nodes[lifetime.first]
        if excess <= 0 or source not in numbers or not _is_gather(trace, source):
            continue
        parts = [n for n in use.nodes[lifetime.first : lifetime.last + 1] if memory_of(n) == memory]
        later_uses = [
            use.position_of[user]
            for n in parts
            for user in n.users
            if use.position_of[user] > use.peak
        ]
        if not later_uses or source.meta.get("again"):
            continue
        repetition = Repetition(
            numbers[source], message_counts[min(later_uses)], len(messages), trace.call(source).kind
        )
        change = _repeat_gather(trace, repetition)
        if change is not None and change.is_done:
            change.undo()  # only a test: all ranks decide before the gather is repeated
            repetitions.append(repetition)
            excess -= lifetime.bytes
    return repetitions


def may_repeat(trace: Trace, repetition: Repetition) -> bool:
    """Return whether this rank can repeat the gather that a rank proposed as ``repetition``."""
    change = _repeat_gather(trace, repetition)
    if change is None or not change.is_done:
        return False
    change.undo()
    return True


def repeat(trace: Trace, repetition: Repetition) -> None:
    """Repeat the gather in this rank's graph, after all ranks have agreed."""
    _repeat_gather(trace, repetition)


def _repeat_gather(trace: Trace, repetition: Repetition) -> Rematerialization | None:
    use = MemoryUse(trace)
    messages, message_counts = _messages(trace, use)
    # Otherwise the message positions of the proposing rank do not apply to this graph.
    if len(messages) != repetition.count:
        return None
    source = messages[repetition.number]
    if not _is_gather(trace, source) or trace.call(source).kind != repetition.kind:
        return None
    (item,) = source.users

    def may_recompute(node: Node) -> bool:
        return node is source or is_cheap(node)

    return Rematerialization(
        trace,
        use,
        memory_of(item),
        lambda n: message_counts[use.position_of[n]] >= repetition.after,
        may_recompute,
    )


def _is_gather(trace: Trace, node: Node) -> bool:
    return node.target is MESSAGE and bool(trace.call(node).gathered) and len(node.users) == 1


def _messages(trace: Trace, use: MemoryUse) -> tuple[list[Node], list[int]]:
    """Return (messages and waits in order; for each node, how many of them are before it).

    Their positions are the same on all ranks, so ranks name gathers to each other by them.
    """
    messages: list[Node] = []
    message_counts = []
    for node in use.nodes:
        message_counts.append(len(messages))
        if trace.is_ordered(node):
            messages.append(node)
    return messages, message_counts
