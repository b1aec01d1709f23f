"""Form of one_hot that, on the CPU, avoids the ``.item()`` calls of torch's own."""

from __future__ import annotations

from torch import Tensor

from ...registry import Shards, form


@form("one_hot", raises_first=True)
def _one_hot(shard: Shards) -> Tensor:
    x, count = shard.tensors[0], shard.get("num_classes", -1)
    if x.device.type != "cpu" or x.numel() == 0 or x.dtype != shard.outs[0].dtype or count < 1:
        return shard.run(*shard.args, **shard.kwargs)
    try:
        # Unlike torch's own, this makes no ``.item()`` call, so it can be part of a compiled step.
        return x.new_zeros(*x.shape, count).scatter_(-1, x.unsqueeze(-1), 1)
    except RuntimeError:
        shard.run(*shard.args, **shard.kwargs)  # its error is about classes
        raise
