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
from .peak import Count
from .rematerialization import Rematerialization
from .rematerialize import is_cheap, waiting
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


def proposals(trace: Trace, most: int) -> list[Repetition]:
    """Return the gathers that this rank would have to repeat to hold at most ``most`` bytes.

    It proposes as few as possible, for the present peak only. Nothing is changed: all ranks decide
    together.
    """
    count = Count(trace)
    messages, before = _messages(trace, count)
    if count.bytes <= most or count.peak >= len(count.nodes):
        return []
    numbers = {node: i for i, node in enumerate(messages)}
    found: list[Repetition] = []
    left = count.bytes - most
    for memory in waiting(count):
        held = count.memories[memory]
        source = count.nodes[held.first]
        if left <= 0 or source not in numbers or not _is_gather(trace, source):
            continue
        parts = [n for n in count.nodes[held.first : held.last + 1] if memory_of(n) == memory]
        ends = [count.at[user] for n in parts for user in n.users if count.at[user] > count.peak]
        if not ends or source.meta.get("again"):
            continue
        one = Repetition(numbers[source], before[min(ends)], len(messages), trace.call(source).kind)
        tried = _again(trace, one)
        if tried is not None and tried.is_done:
            tried.undo()  # only a test: all ranks decide before the gather is repeated
            found.append(one)
            left -= held.bytes
    return found


def may_repeat(trace: Trace, one: Repetition) -> bool:
    """Return whether this rank can repeat the gather ``one``, which any of the ranks proposed."""
    tried = _again(trace, one)
    if tried is None or not tried.is_done:
        return False
    tried.undo()
    return True


def repeat(trace: Trace, one: Repetition) -> None:
    """Repeat the gather in this rank's graph, after all ranks have agreed."""
    _again(trace, one)


def _again(trace: Trace, one: Repetition) -> Rematerialization | None:
    count = Count(trace)
    messages, before = _messages(trace, count)
    # Otherwise the message positions of the proposing rank do not apply to this graph.
    if len(messages) != one.count:
        return None
    source = messages[one.number]
    if not _is_gather(trace, source) or trace.call(source).kind != one.kind:
        return None
    (item,) = source.users

    def may(node: Node) -> bool:
        return node is source or is_cheap(node)

    return Rematerialization(
        trace, count, memory_of(item), lambda n: before[count.at[n]] >= one.after, may
    )


def _is_gather(trace: Trace, node: Node) -> bool:
    return node.target is MESSAGE and bool(trace.call(node).gathered) and len(node.users) == 1


def _messages(trace: Trace, count: Count) -> tuple[list[Node], list[int]]:
    """Return (messages and waits in order; for each node, how many of them are before it).

    Their positions are the same on all ranks, so ranks name gathers to each other by them.
    """
    messages: list[Node] = []
    before = []
    for node in count.nodes:
        before.append(len(messages))
        if trace.is_ordered(node):
            messages.append(node)
    return messages, before
