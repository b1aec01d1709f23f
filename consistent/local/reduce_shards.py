"""The sum of a partial tensor's addends with what follows it, in one pass over them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import _native as native


@dataclass(frozen=True, slots=True)
class Epilogue:
    """norm(activation(scale * sum)): what follows a sum, without its tensors.

    Args:
        activation: "none", "relu", "gelu", "gelu_tanh", "silu".
        norm: "none", "layer", "rms", over the last ``normalized`` dims.
    """

    scale: float = 1.0
    activation: str = "none"
    norm: str = "none"
    normalized: int = 0
    eps: float = 1e-5

    def after(self, total: Tensor, weight: Tensor | None, norm_bias: Tensor | None) -> Tensor:
        """What follows the total, by torch's own ops."""
        y = _ACTIVATIONS[self.activation](total)
        shape = y.shape[y.ndim - self.normalized :]
        if self.norm == "layer":
            return F.layer_norm(y, shape, weight, norm_bias, self.eps)
        if self.norm == "none":
            return y
        y = F.rms_norm(y, shape, weight, self.eps)
        return y if norm_bias is None else y + norm_bias


_ACTIVATIONS = {
    "none": lambda x: x,
    "relu": torch.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
}


@dataclass(frozen=True, slots=True)
class Given:
    """What an epilogue reads beside the parts; each may be absent. bias: one number a column;
    residual: as the result."""

    bias: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None


class Source(Protocol):
    """Where the parts come from, and where the gradient of their sum goes to."""

    def open(self, tensors: Sequence[Tensor]) -> AbstractContextManager[tuple[list[Tensor], Slice]]:
        """The parts, to be read inside the block, and what of them is kept."""
        ...

    def back(self, grad: Tensor) -> Sequence[Tensor]:
        """The gradient of the kept sum -> of each tensor."""
        ...


@dataclass(frozen=True, slots=True)
class Slice:
    """[start, start + size) of ``dim``."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class Listed:
    """Parts that this rank has, of one shape."""

    kept: Slice
    shape: tuple[int, ...]
    count: int

    @contextmanager
    def open(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Slice]]:
        yield list(tensors), self.kept

    def back(self, grad: Tensor) -> Sequence[Tensor]:
        dim, after = self.kept.dim, len(self.shape) - 1 - self.kept.dim
        behind = self.shape[dim] - self.kept.start - self.kept.size
        whole = F.pad(grad, (0, 0) * after + (self.kept.start, behind))
        return [whole] * self.count


def reduce_shards(
    parts: Sequence[Tensor],
    epilogue: Epilogue = Epilogue(),  # noqa: B008  (a value)
    given: Given = Given(),  # noqa: B008  (a value)
    kept: Slice | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """norm(activation(scale * sum of parts + bias + residual)), of what is kept, in one pass.

    ```
    [n, m], [n, m], ... -> [n, m]          kept=Slice(0, 1, 2):  -> [2, m], rows 1 and 2
    ```

    Added in the order of ``parts``, in float32, of float64 in float64. Differentiable any number of
    times.

    Raises:
        ValueError: there are no parts.
        RuntimeError: parts differ, the slice is not inside, or it cuts a normalized dim.
    """
    if not parts:
        raise ValueError(
            "reduce_shards: no parts were given.\n  Their sum would have no shape and no dtype.\n"
            "  Pass at least one tensor."
        )
    if kept is None:
        kept = Slice(0, 0, parts[0].shape[0])
    source = Listed(kept, tuple(parts[0].shape), len(parts))
    return reduce_from(source, parts, epilogue, given, dtype)


def reduce_from(
    source: Source,
    tensors: Sequence[Tensor],
    epilogue: Epilogue,
    given: Given,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The same with the parts that ``source`` makes of ``tensors``."""
    beside = (given.bias, given.residual, given.weight, given.norm_bias)
    return _Reduce.apply(source, epilogue, dtype, *beside, *tensors)[0]


class _Reduce(torch.autograd.Function):
    """
    ```
    forward    parts -> total -> out
    backward   grad of out -> of total, by torch's ops -> of every part: the same, scaled
    ```
    """

    @staticmethod
    def forward(
        ctx: Any, source: Source, epilogue: Epilogue, dtype: torch.dtype | None, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        (bias, residual, weight, norm_bias), parts = tensors[:4], tensors[4:]
        shaped = epilogue.activation != "none" or epilogue.norm != "none"
        with source.open(parts) as (opened, kept):
            out, total = native.reduce_shards(
                opened,
                kept.dim,
                kept.start,
                kept.size,
                scale=epilogue.scale,
                bias=bias,
                residual=residual,
                activation=epilogue.activation,
                norm=epilogue.norm,
                normalized=epilogue.normalized,
                weight=weight,
                norm_bias=norm_bias,
                eps=epilogue.eps,
                keep_total=shaped and any(ctx.needs_input_grad),
                dtype=dtype,
            )
        ctx.source, ctx.epilogue, ctx.shaped, ctx.inner = source, epilogue, shaped, parts[0].dtype
        ctx.save_for_backward(total, weight, norm_bias, bias)
        ctx.set_materialize_grads(False)
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, _grad_total: Tensor | None) -> tuple:
        total, weight, norm_bias, bias = ctx.saved_tensors
        at_weight = at_bias = None
        at_total = _sum(_grad_total, None)
        if grad is not None and ctx.shaped:
            found = _through(ctx.epilogue, total, weight, norm_bias, grad)
            at_total, at_weight, at_bias = _sum(at_total, found[0]), found[1], found[2]
        elif grad is not None:
            at_total = grad
        if at_total is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = ctx.needs_input_grad
        at_column = None
        if needs[3]:
            at_column = at_total.sum(tuple(range(at_total.ndim - 1))).reshape(bias.shape)
            at_column = at_column.to(bias.dtype)
        parts: Sequence[Tensor | None] = [None] * (len(needs) - 7)
        if any(needs[7:]):
            scaled = at_total if ctx.epilogue.scale == 1 else at_total * ctx.epilogue.scale
            parts = ctx.source.back(scaled.to(ctx.inner))
        beside = at_column, at_total if needs[4] else None, at_weight, at_bias
        return (None, None, None, *beside, *parts)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _through(
    epilogue: Epilogue,
    total: Tensor,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    grad: Tensor,
) -> list[Tensor | None]:
    """Gradients of total, weight and norm_bias; differentiable where grad mode is on."""
    again = torch.is_grad_enabled()
    if not again:
        total = total.detach().requires_grad_()
        weight, norm_bias = (
            None if t is None else t.detach().requires_grad_() for t in (weight, norm_bias)
        )
    tensors = (total, weight, norm_bias)
    with torch.enable_grad():
        y = epilogue.after(*tensors)
    leaves = [t for t in tensors if t is not None and t.requires_grad]
    made = iter(torch.autograd.grad(y, leaves, grad.to(y.dtype), create_graph=again))
    return [next(made) if t is not None and t.requires_grad else None for t in tensors]
