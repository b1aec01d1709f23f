"""Pass that limits the memory in use in a program (option ``memory``), as far as it can.

```
before other passes   all ranks find the largest peak            limits what merge_equal may keep
after them            each rank recomputes cheap values          passes/rematerialize
                      all ranks agree on gathers to repeat       passes/regather
```
"""

from __future__ import annotations

from mirrored.every_rank import gather_from_ranks

from ...spec.bytes_text import bytes_text
from ..options import CompileOptions
from .peak import MemoryUse, remove_dead
from .regather import Repetition, may_repeat, propose_repetitions, repeat
from .rematerialize import rematerialize
from .trace import Trace

_ROUNDS = 64


def limit_keep_bytes(trace: Trace, options: CompileOptions) -> None:
    """Limit what later passes may keep alive, ``trace.keep_bytes``, by the option ``memory``.

    The limit is what the option leaves on the rank that holds most. All ranks use the same limit,
    so that they merge the same messages. This is a collective of the world.
    """
    if options.memory is None:
        return
    remove_dead(trace)
    trace.held = MemoryUse(trace).bytes
    most = max(gather_from_ranks(trace.held))
    trace.keep_bytes = min(trace.keep_bytes, max(0, options.memory - most))


def bound_memory(trace: Trace, options: CompileOptions) -> None:
    """Recompute values and repeat gathers until at most ``options.memory`` bytes are held.

    If that is not enough, the program holds more; a note for ``show()`` says how much.
    """
    if options.memory is None:
        return
    remove_dead(trace)
    recomputed_count = rematerialize(trace, options.memory)
    gather_count = _regather(trace, options.memory)
    # A repeated gather can lower the peak, so that recomputing other values helps now.
    recomputed_count += rematerialize(trace, options.memory) if gather_count else 0
    peak_after = MemoryUse(trace).bytes
    trace.notes.append(
        f"memory: {bytes_text(trace.held)} held at a time, {bytes_text(peak_after)} after "
        f"{recomputed_count} values are made again and {gather_count} gathered again; "
        f"the bound is {bytes_text(options.memory)}"
        + ("" if peak_after <= options.memory else ", and nothing else can be let go of")
    )


def _regather(trace: Trace, most: int) -> int:
    """Repeat gathers, so that this rank holds at most ``most`` bytes, and return how many.

    A gather is repeated if at least one rank proposes it and every rank can repeat it. This is a
    collective of the world.
    """
    gather_count = 0
    refused: set[Repetition] = set()
    for _ in range(_ROUNDS):
        proposals_by_rank = gather_from_ranks(propose_repetitions(trace, most))
        candidates = sorted(
            {repetition for rank_proposals in proposals_by_rank for repetition in rank_proposals}
            - refused
        )
        if not candidates:
            break
        if all(gather_from_ranks(may_repeat(trace, candidates[0]))):
            repeat(trace, candidates[0])  # one per round: it changes the positions of the others
            gather_count += 1
        else:
            refused.add(candidates[0])
    return gather_count
