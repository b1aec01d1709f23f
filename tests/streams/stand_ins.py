"""A rank whose tensors lie in main memory, and whose code believes that they are on a GPU.

```
placement("cuda")    tensors on the CPU          code asks for the device's type: "cuda"
torch.cuda           Cuda                        streams and events that are noted
NCCL's group         Communicator                the collective is noted, and gloo moves the bytes
every op             Ops, a dispatch mode        what it reads and writes, on which stream
```

What is noted is what the very code that runs on GPUs asks for. A collective is done when it was
asked for: whether its result is read too early is for `orders.py` to say, from the log.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from consistent.spec import placement as placements
from consistent.spec.tracer import Tracer
from mirrored import Ranks
from mirrored.transports import side_stream
from mirrored.transports.default import replace_current
from mirrored.transports.torch_dist import groups, transport
from tests.streams.cuda import Cuda, Stream
from tests.streams.group import Communicator, OnGpu
from tests.streams.noted import Log
from tests.streams.peers import reading_peers

GPU = torch.device("cuda", 0)


class _Gpus(type(placements._world())):
    def has_gpus(self) -> bool:
        return True


def _beside_of(cls: Any, xs: Sequence[Tensor]) -> Any:
    return cls(GPU) if xs else None


@contextmanager
def on_a_gpu(peers: bool = False) -> Iterator[Log]:
    """A rank of gloo is one with a GPU inside; what it asks for is noted. With ``peers`` the GPUs
    read each other's memory."""
    log = Log()
    cuda = Cuda(log)
    below = OnGpu(log, cuda)

    def hold(x: Tensor, stream: Stream) -> None:
        log.note("held", stream.name, writes=log.numbers([x], stream.name))

    def make(members: Ranks, position: int) -> Any:
        return Communicator(log, cuda, members)

    with ExitStack() as stack:
        for change in (
            patch.object(side_stream, "cuda", cuda),
            patch.object(side_stream, "_streams", {}),
            patch.object(side_stream.SideStreamMessage, "for_tensors", classmethod(_beside_of)),
            patch.object(Tensor, "record_stream", hold),
            patch.object(transport, "_uses_nccl", below.by_nccl),
            patch.object(groups, "_make_nccl_group", make),
            patch.object(groups.world(), "groups", {}),
        ):
            stack.enter_context(change)
        stack.enter_context(Tracer(world=_Gpus).tracing())
        used = stack.enter_context(reading_peers(below, log, cuda)) if peers else below
        stack.enter_context(replace_current(used))
        stack.enter_context(cuda.stream(Stream("program", log)))
        yield log
        log.open = False
