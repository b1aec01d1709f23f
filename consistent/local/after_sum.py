"""An op in the same pass as the sum that boxes its first operand from P to S: forward it reads the
ranks' addends, backward its gradient is boxed the other way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from ..boxing.differentiable import box
from ..boxing.run import addends
from ..rules.after_sum import FORM
from ..spec import TensorSpec
from .forms import Shards, form
from .reduce_shards import Epilogue, Given, Slice, reduce_from


@dataclass(frozen=True, slots=True)
class Boxed:
    """The addends that boxing ``src`` to ``dst`` ends in.

    ```
    forward    src ------> dst, but for the sum
    backward   dual(src) <------ dual(dst)
    ```
    """

    src: TensorSpec
    dst: TensorSpec

    @contextmanager
    def open(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Slice]]:
        with addends(tensors[0], self.src, self.dst) as (parts, dim, start, size):
            yield parts, Slice(dim, start, size)

    def back(self, grad: Tensor) -> Sequence[Tensor]:
        return [box(grad, self.dst.dual, self.src.dual)]


@form(FORM)
def after_sum(shard: Shards) -> Tensor:
    """relu, gelu, silu, x + y, layer_norm, rms_norm of a sum."""
    src = shard.specs[0]
    source = Boxed(src, src.with_sbp(shard.outs[0].sbp))
    epilogue, given = _follows(shard)
    return reduce_from(source, shard.tensors[:1], epilogue, given)


def _follows(shard: Shards) -> tuple[Epilogue, Given]:
    name = shard.call.name
    if name == "add":
        other = shard.tensors[1]
        whole = shard.call.operands[1].shape == shard.call.operands[0].shape
        return Epilogue(), Given(residual=other) if whole else Given(bias=other)
    if name.endswith("_norm"):
        kind, dims = name.removesuffix("_norm"), len(shard.get("normalized_shape"))
        eps = shard.get("eps", 1e-5 if kind == "layer" else None)
        if eps is None:
            eps = torch.finfo(shard.tensors[0].dtype).eps
        bias = shard.get("bias") if kind == "layer" else None
        given = Given(weight=shard.get("weight"), norm_bias=bias)
        return Epilogue(norm=kind, normalized=dims, eps=eps), given
    tanh = shard.kwargs.get("approximate", "none") == "tanh"
    return Epilogue(activation="gelu_tanh" if tanh else name), Given()
