"""Adapter for torch.profiler: shows boxings (redistributions of global tensors) among its events.

The name of an event has the layouts, the collective and the bytes.

```
with torch.profiler.profile() as profile, name_boxings():
    step()
print(profile.key_averages().table())     # boxing S(0) -all_gather(0)-> B, 4096 bytes
```

In a name S(0) is sharded along dim 0, B replicated, P a partial sum.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from ..boxing.plan import plan_bytes
from ..boxing.steps import Step
from ..spec import TensorSpec
from ..spec.tracer import Tracer


@contextmanager
def name_boxings() -> Iterator[None]:
    """Record a profiler event at the start of each boxing (redistribution) inside the block.

    Without this context boxings have no extra cost.
    """

    def mark(src: TensorSpec, dst: TensorSpec, moves: tuple[Step, ...]) -> None:
        if moves and torch.autograd._profiler_enabled():  # pyright: ignore[reportPrivateImportUsage]
            text = ", ".join(map(str, moves))
            with torch.profiler.record_function(f"boxing {text}, {plan_bytes(moves)} bytes"):
                pass

    with Tracer(on_boxing_begin=mark).tracing():
        yield
