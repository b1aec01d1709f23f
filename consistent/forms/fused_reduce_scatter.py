"""Form of rms_norm fused with the reduce-scatter that boxes its operand from P to S.

Forward reads the ranks' addends directly; backward boxes the gradient the other way.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..movement.boxed import box
from ..movement.run import addends
from ..rules.fused_reduce_scatter import FORM
from ..spec import TensorSpec
from .native.reduce_shards import Epilogue, EpilogueInputs, Slice, reduce_from
from .registry import Shards, form


@dataclass(frozen=True, slots=True)
class BoxedParts:
    """Source of the addends of a P operand, whose sum is the last step of boxing it.

    A ``PartsSource`` for ``reduce_from``. The operand is boxed from ``src`` to ``dst``:

    ```
    forward    src ------> dst, except for the final sum
    backward   dual(src) <------ dual(dst)
    ```
    """

    src: TensorSpec
    dst: TensorSpec

    @contextmanager
    def open(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Slice]]:
        with addends(tensors[0], self.src, self.dst) as (parts, dim, start, size):
            yield parts, Slice(dim, start, size)

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        return [box(grad, self.dst.dual, self.src.dual)]


@form(FORM)
def fused_reduce_scatter(shard: Shards) -> Tensor:
    """Compute this rank's part of rms_norm of a P operand, in one pass over the ranks' addends.

    It replaces a reduce-scatter of the operand and a separate rms_norm.
    """
    src, eps = shard.specs[0], shard.get("eps")
    # rms_norm's default eps.
    eps = torch.finfo(shard.tensors[0].dtype).eps if eps is None else eps
    epilogue = Epilogue(norm="rms", normalized=len(shard.get("normalized_shape")), eps=eps)
    source = BoxedParts(src, src.with_sbp(shard.outs[0].sbp))
    return reduce_from(
        source, shard.tensors[:1], epilogue, EpilogueInputs(weight=shard.get("weight"))
    )
