"""Pass that limits the bytes that a program holds at a time (option ``memory``), as far as it can.

```
before other passes   all ranks find the largest peak            limits what merge_equal may keep
after them            each rank recomputes cheap values          passes/rematerialize
                      all ranks agree on gathers to repeat       passes/regather
```
"""

from __future__ import annotations

from mirrored.every_rank import gathered

from ...spec.bytes_text import bytes_text
from ..options import CompileOptions
from .peak import Count, remove_dead
from .regather import Repetition, may_repeat, proposals, repeat
from .rematerialize import rematerialize
from .trace import Trace

_ROUNDS = 64


def leave_room(trace: Trace, options: CompileOptions) -> None:
    """Limit what later passes may keep alive, ``trace.keep_bytes``, by the option ``memory``.

    The limit is what the option leaves on the rank that holds most. All ranks use the same limit,
    so that they merge the same messages. This is a collective of the world.
    """
    if options.memory is None:
        return
    remove_dead(trace)
    trace.held = Count(trace).bytes
    most = max(gathered(trace.held))
    trace.keep_bytes = min(trace.keep_bytes, max(0, options.memory - most))


def bound_memory(trace: Trace, options: CompileOptions) -> None:
    """Recompute values and repeat gathers until at most ``options.memory`` bytes are held.

    If that is not enough, the program holds more; a note for ``show()`` says how much.
    """
    if options.memory is None:
        return
    remove_dead(trace)
    again = rematerialize(trace, options.memory)
    sent = _regather(trace, options.memory)
    # A repeated gather can lower the peak, so that recomputing other values helps now.
    again += rematerialize(trace, options.memory) if sent else 0
    after = Count(trace).bytes
    trace.notes.append(
        f"memory: {bytes_text(trace.held)} held at a time, {bytes_text(after)} after "
        f"{again} values are made again and {sent} gathered again; "
        f"the bound is {bytes_text(options.memory)}"
        + ("" if after <= options.memory else ", and nothing else can be let go of")
    )


def _regather(trace: Trace, most: int) -> int:
    """Repeat gathers, so that this rank holds at most ``most`` bytes, and return how many.

    A gather is repeated if at least one rank proposes it and every rank can repeat it. This is a
    collective of the world.
    """
    sent = 0
    refused: set[Repetition] = set()
    for _ in range(_ROUNDS):
        every = gathered(proposals(trace, most))
        wanted = sorted({one for mine in every for one in mine} - refused)
        if not wanted:
            break
        if all(gathered(may_repeat(trace, wanted[0]))):
            repeat(trace, wanted[0])  # one per round: it changes the positions of the others
            sent += 1
        else:
            refused.add(wanted[0])
    return sent
