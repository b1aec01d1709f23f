"""Short messages of a fixed size: a flag for a note, and the numbers of a small tensor.

A note is what a rank tells the others instead of making their call, such as its error.

```
0        4                    8          16                       80
| note   | number of the call |          | numbers of a tensor    |
```

A rank that has a note does not make the call that the others make, and cannot know what they send;
so the size is always the same. There is such a message for each op that may raise on some ranks
alone (``consistent/dispatch/running/agreed.py``) and for each number that is read, and a rank waits
for it. To be fast, memory is reused, and the header is read as bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import Ranks
from . import messages
from .groups import world

CARRIED_BYTES = 64
_NUMBER, _CARRIED, _BYTES = slice(4, 8), 16, 80


class Part(NamedTuple):
    """One rank's short message, as ``swap`` returns it: a flag, and the tensor that it carries."""

    has_note: bool
    call: int  # number of the call that the tensor belongs to; 0 if there is none
    memory: Tensor

    def carried(self, like: Tensor) -> Tensor:
        """Return the tensor in the message as a view with the shape and dtype of ``like``.

        The next ``swap`` with the same ranks overwrites its memory.
        """
        return _carried(self.memory, like)


def _carried(memory: Tensor, like: Tensor) -> Tensor:
    part = memory[_CARRIED : _CARRIED + like.nbytes]
    return part.view(like.dtype).view(like.shape)


class _Memory:
    """Buffers for one message of each rank of a group, kept for the next ``swap``."""

    def __init__(self, ranks: Ranks) -> None:
        self.rows = [torch.zeros(_BYTES, dtype=torch.uint8, device="cpu") for _ in ranks]
        arrays: list[Any] = [row.numpy() for row in self.rows]
        self.views = [memoryview(array) for array in arrays]


_free: dict[Ranks, _Memory] = {}
_SHOWN = torch.empty(_BYTES, dtype=torch.uint8, device="meta")  # stands for a message in errors


def swap(
    name: str, ranks: Ranks, x: Tensor | None = None, *, has_note: bool = False, call: int = 0
) -> list[Part]:
    """Exchange one short message with each of ``ranks``; return all of them in order.

    Args:
        name: the name of the collective, for the tag and errors.
        ranks: the members.
        x: a tensor of at most ``CARRIED_BYTES`` to send along.
        has_note: whether this rank has a note.
        call: a number for the call with ``x``, sent in the message, so that ``x`` is left out of
            the tag. Use it where another rank may not make the call, and so cannot know ``x``.
    """
    own = world()
    me = ranks.index(own.rank)
    sockets = own.sockets_to(ranks)
    shown = _SHOWN if x is None else x
    tag = messages.tag_of(name, _SHOWN if call else shown, ranks)

    def run() -> list[Part]:
        # Taken here, after `carry_out` has checked that this thread may communicate: a thread that
        # is refused must not overwrite messages that this rank still reads.
        memory = _free.pop(ranks, None) or _Memory(ranks)
        memory.views[me][0] = has_note
        memory.views[me][_NUMBER] = call.to_bytes(4, "little")
        if x is not None:
            _carried(memory.rows[me], x).copy_(x)
        others = [(rank, memory.rows[k]) for k, rank in enumerate(ranks) if k != me]
        works: list[Any] = [sockets.receive(rank, tag, row) for rank, row in others]
        works += [sockets.send(rank, tag, memory.rows[me]) for rank, _ in others]
        sockets.wait(works)
        # Only after success: after an error sockets may still read or write it.
        _free[ranks] = memory
        return [
            Part(bool(view[0]), int.from_bytes(view[_NUMBER], "little"), row)
            for view, row in zip(memory.views, memory.rows, strict=True)
        ]

    return own.carry_out(name, shown, ranks, run)
