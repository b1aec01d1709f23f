"""Short messages of a fixed size, with a flag and the numbers of a small tensor.

The flag says whether the rank has a note: what it sends instead of making the others' call, such as
its error.

```
0        4                    8          16                       80
| note   | number of the call |          | numbers of a tensor    |
```

A rank that has a note does not make the call that the others make, and cannot know what they send;
so the size is always the same. There is such a message for each op that may raise on some ranks
alone (``consistent/dispatch/running/agreed.py``) and for each all-reduce of so small a tensor, as
in ``loss.item()``, and a rank waits for it. To be fast, memory is reused, and the header is read as
bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ...comm import Ranks
from . import messages
from .groups import world

CARRIED_BYTES = 64
_CALL_SLICE, _CARRIED_START, _MESSAGE_BYTES = slice(4, 8), 16, 80


class ShortMessage(NamedTuple):
    """One rank's short message, from ``exchange_short``: a flag, and the tensor that it carries."""

    has_note: bool
    call: int  # number of the call that the tensor belongs to; 0 if there is none
    memory: Tensor

    def view_as(self, like: Tensor) -> Tensor:
        """Return the tensor in the message as a view with the shape and dtype of ``like``.

        The next ``exchange_short`` with the same ranks overwrites its memory.
        """
        return _carried_view(self.memory, like)


def _carried_view(memory: Tensor, like: Tensor) -> Tensor:
    part = memory[_CARRIED_START : _CARRIED_START + like.nbytes]
    return part.view(like.dtype).view(like.shape)


class _Buffers:
    """Buffers for one message of each rank of a group, kept for the next ``exchange_short``."""

    def __init__(self, ranks: Ranks) -> None:
        self.rows = [torch.zeros(_MESSAGE_BYTES, dtype=torch.uint8, device="cpu") for _ in ranks]
        arrays: list[Any] = [row.numpy() for row in self.rows]
        self.views = [memoryview(array) for array in arrays]


_free_buffers: dict[Ranks, _Buffers] = {}
# Stands for a message in errors.
_PLACEHOLDER = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device="meta")


def exchange_short(
    name: str, ranks: Ranks, x: Tensor | None = None, *, has_note: bool = False, call: int = 0
) -> list[ShortMessage]:
    """Exchange one short message with each of ``ranks``; return all of them in order.

    Args:
        name: the name of the collective, for the tag and errors.
        ranks: the members.
        x: a tensor of at most ``CARRIED_BYTES`` to send along.
        has_note: whether this rank has a note.
        call: a number for the call with ``x``, sent in the message, so that ``x`` is left out of
            the tag. Use it where another rank may not make the call, and so cannot know ``x``.
    """
    state = world()
    position = ranks.index(state.rank)
    sockets = state.sockets_to(ranks)
    described_tensor = _PLACEHOLDER if x is None else x
    tag = messages.tag_of(name, _PLACEHOLDER if call else described_tensor, ranks)

    def run() -> list[ShortMessage]:
        # Taken here, after `run_watched` has checked that this thread may communicate: a thread
        # that is refused must not overwrite messages that this rank still reads.
        memory = _free_buffers.pop(ranks, None) or _Buffers(ranks)
        memory.views[position][0] = has_note
        memory.views[position][_CALL_SLICE] = call.to_bytes(4, "little")
        if x is not None:
            _carried_view(memory.rows[position], x).copy_(x)
        others = [(rank, memory.rows[k]) for k, rank in enumerate(ranks) if k != position]
        works: list[Any] = [sockets.receive(rank, tag, row) for rank, row in others]
        works += [sockets.send(rank, tag, memory.rows[position]) for rank, _ in others]
        sockets.wait(works)
        # Only after success: after an error sockets may still read or write it.
        _free_buffers[ranks] = memory
        return [
            ShortMessage(bool(view[0]), int.from_bytes(view[_CALL_SLICE], "little"), row)
            for view, row in zip(memory.views, memory.rows, strict=True)
        ]

    return state.run_watched(name, described_tensor, ranks, run)
