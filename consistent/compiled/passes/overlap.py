"""Pass that overlaps messages with computation: it starts them as early, and waits for them as
late, as data dependencies and memory allow.

```
%3 = all_gather(%1)             start all_gather(%1)
%4 = mm(%2, %3)                 start all_gather(%5)     while %4 is computed
%6 = all_gather(%5)      -->    %3 = wait for all_gather(%1)
%7 = mm(%4, %6)                 %4 = mm(%2, %3)
                                %6 = wait for all_gather(%5)
                                %7 = mm(%4, %6)
```

Messages are started in the order in which they were sent, and this order is part of the program.
Ranks may therefore start them at different ops without an agreement. A result counts as held from
the start of its message.
"""

from __future__ import annotations

from typing import Any

from torch.fx import Node

from mirrored.background import has_spare_cores
from mirrored.transports.default import current

from ...spec.bytes_text import bytes_text
from ..listing import is_item
from ..opaque import MESSAGE, SENDING_OPS, START_MESSAGE, WAIT_MESSAGE
from ..options import CompileOptions
from ..program import GRAPH_BREAK
from .peak import MemoryUse, remove_dead
from .trace import Trace, memory_of

# Without ``memory``, the peak may grow by this many of the largest message results.
_EXTRA_RESULTS = 2


def overlap(trace: Trace, options: CompileOptions) -> None:
    """Let messages run concurrently with ops, as the option ``overlap`` says.

    With "auto", this happens only if all ranks have spare cores for the thread that sends.
    """
    if not options.overlap:
        return
    if options.overlap == "auto" and not has_spare_cores(tuple(range(current().size))):
        return
    remove_dead(trace)
    peak_before = MemoryUse(trace).bytes
    overlap_count = _overlap_messages(
        trace, None if options.memory is None else max(options.memory, peak_before)
    )
    peak_after = MemoryUse(trace).bytes
    trace.notes.append(
        f"overlap: {overlap_count} messages run beside ops; {bytes_text(peak_after)} held at a "
        f"time, {bytes_text(peak_before)} before"
    )


def _overlap_messages(trace: Trace, most: int | None) -> int:
    """Split messages into a start and a wait, and move the two apart; return how many overlap.

    Args:
        most: bytes that may be held at a time; None allows the present peak plus the
            ``_EXTRA_RESULTS`` largest results of messages.
    """
    _move_placeholders_first(trace)
    count = MemoryUse(trace)
    messages = [node for node in trace.messages() if _may_move(trace, node)]
    if most is None:
        sizes = (sum(x.meta.get("held", 0) for x in node.users) for node in messages)
        most = count.bytes + sum(sorted(sizes, reverse=True)[:_EXTRA_RESULTS])
    pairs = [_split_message(trace, node, i) for i, node in enumerate(messages)]
    for start, wait in reversed(pairs):
        _move_wait_later(trace, start, wait, most)
    for start, wait in pairs:
        _move_start_earlier(trace, start, wait, most)
    overlap_count = 0
    for start, wait in pairs:
        if _has_work(start, wait):
            overlap_count += 1
        else:
            _rejoin_message(trace, start, wait)
    return overlap_count


def _move_placeholders_first(trace: Trace) -> None:
    """Move the placeholders before all ops: a segment reads its inputs before its ops run."""
    placeholders = [node for node in trace.graph.nodes if node.op == "placeholder"]
    for node in reversed(placeholders):
        next(iter(trace.graph.nodes)).prepend(node)


def _may_move(trace: Trace, node: Node) -> bool:
    """Return whether the message can be started early and waited for late.

    It must only send and receive, on the CPU or a GPU, and nothing may modify its results.
    """
    call = trace.call(node)
    kinds = {device.type for _, _, device in call.outs}
    if not node.users or call.computes or kinds not in ({"cpu"}, {"cuda"}):
        return False
    return not MemoryUse.written_memories(trace) & {memory_of(x) for x in node.users}


def _split_message(trace: Trace, node: Node, ticket: int) -> tuple[Node, Node]:
    """Replace a message by a start and a wait next to it, and return the two.

    ``ticket`` is the number by which the wait finds its message.
    """
    with trace.graph.inserting_before(node):
        start = trace.graph.call_function(START_MESSAGE, (*node.args, ticket))
        wait = trace.graph.call_function(WAIT_MESSAGE, (*node.args, ticket))
    start.meta.update(node.meta)
    wait.meta.update(node.meta, started=start)
    node.replace_all_uses_with(wait)
    trace.graph.erase_node(node)
    return start, wait


def _rejoin_message(trace: Trace, start: Node, wait: Node) -> None:
    """Turn a start and its wait back into one message; called if no op runs between the two."""
    with trace.graph.inserting_before(start):
        node = trace.graph.call_function(MESSAGE, start.args[:2])
    node.meta.update(start.meta)
    wait.replace_all_uses_with(node)
    for item in reversed(list(node.users)):
        node.append(item)
    trace.graph.erase_node(wait)
    trace.graph.erase_node(start)


def _move_wait_later(trace: Trace, start: Node, wait: Node, most: int) -> None:
    """Move the wait of a message as late as possible.

    That is just before the first op that reads a result or modifies what is sent, or the end of the
    segment. The move is undone if more than ``most`` bytes would be held.
    """
    items = list(wait.users)
    readers = {user for item in items for user in item.users}
    sent_memories = {memory_of(x) for x in start.all_input_nodes}
    node = items[-1].next if items else wait.next
    while node.op != "root" and node.target is not GRAPH_BREAK and node not in readers:
        if sent_memories & node.meta.get("written", set()):
            break
        node = node.next
    _move_before([wait, *items], node)
    if MemoryUse(trace).bytes > most:
        _move_before([wait, *items], start.next)


def _move_start_earlier(trace: Trace, start: Node, wait: Node, most: int) -> None:
    """Move the start of a message as early as possible.

    That is just after the previous message was started, or after the ops that compute or write its
    inputs. The move is undone if more than ``most`` bytes would be held.
    """
    inputs = set(start.all_input_nodes)
    sent_memories = {memory_of(x) for x in inputs}
    position = start.prev
    while position.op != "root" and position not in inputs and position.target is not GRAPH_BREAK:
        # Starts keep their order, in which all ranks send.
        if position.target in SENDING_OPS or sent_memories & position.meta.get("written", set()):
            break
        if position.op == "placeholder":
            break
        position = position.prev
    next_node = start.next
    position.append(start)
    if MemoryUse(trace).bytes > most:
        next_node.prepend(start)


def _move_before(nodes: list[Node], before: Node) -> None:
    for node in nodes:
        before.prepend(node)


def _has_work(start: Node, wait: Node) -> bool:
    """Return whether ops run between start and wait, so that splitting the message is useful."""
    node = start.next
    while node is not wait:
        if node.op == "call_function" and not _is_message(node):
            return True
        node = node.next
    return False


def _is_message(node: Any) -> bool:
    if node.target in (*SENDING_OPS, WAIT_MESSAGE):
        return True
    return is_item(node) and _is_message(node.args[0])
