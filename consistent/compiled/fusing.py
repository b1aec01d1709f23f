"""Which messages are fused with the ops beside them: all ranks of a message do it, or none.

```
each rank     what it could fuse          passes/fuse
all ranks     what all ranks of a message could fuse, and what of it wins: by the cost model
each rank     fuses that
```
"""

from __future__ import annotations

from mirrored.transports.default import current

from ..overlap.chunked_matmul import MOST_CHUNKS, chunk_count
from ..overlap.symmetric_matmul import fused_over
from .agree import gathered
from .fused.worth import sum_wins
from .passes import Trace
from .passes.fuse import Fusion, fuse, fusions
from .passes.peak import remove_dead


class Fusing:
    """The fusions of one recording. Every rank calls ``run``, or ``absent``.

    Args:
        always: fuse all that can be, in place of what wins.
        one_by_one: whether the ops of a program run one by one, each a kernel of its own.
    """

    def __init__(self, always: bool, one_by_one: bool) -> None:
        self._always, self._one_by_one = always, one_by_one

    def absent(self) -> None:
        """This rank has no program."""
        gathered(None)

    def run(self, trace: Trace) -> None:
        """Change it."""
        remove_dead(trace)
        mine = fusions(trace)
        every = gathered(mine)
        if None in every:
            return
        others = [set(each) for each in every]
        both = [f for f in mine if all(f in others[rank] for rank in f.ranks)]
        chosen = {f: chunks for f in both if (chunks := self._chunks(f))}
        done = fuse(trace, chosen)
        if done:
            trace.notes.append(f"fuse: {done} messages are one call with the ops beside them")

    def _chunks(self, found: Fusion) -> int:
        """In how many it is done; 0 where it does not win. All its ranks get the same."""
        if found.specs is not None:
            if self._always:
                return MOST_CHUNKS
            count = chunk_count(*found.specs)
            return count if count > 1 or fused_over(*found.specs) else 0
        if self._always:
            return 1
        assert found.dtype is not None
        return int(
            sum_wins(
                found.kind, found.ops, found.nbytes, found.dtype, len(found.ranks), found.device,
                one_by_one=self._one_by_one,
                shared=found.device == "cuda"
                and current().shares(found.ranks, "cuda", found.nbytes),
            )
        )  # fmt: skip
