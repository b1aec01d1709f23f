"""Sum of the addends of a P tensor, fused with the ops that follow it into one pass."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from . import load as native

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Epilogue:
    """Settings of the ops that follow a sum: norm(activation(scale * sum)).

    The tensors that these ops read are in ``EpilogueInputs``.

    Args:
        scale: factor of the sum.
        activation: "none", "relu", "gelu", "gelu_tanh", "silu".
        norm: "none", "layer", "rms", over the last ``normalized`` dims.
        normalized: number of dims that ``norm`` covers.
        eps: epsilon of ``norm``.
    """

    scale: float = 1.0
    activation: str = "none"
    norm: str = "none"
    normalized: int = 0
    eps: float = 1e-5


def _silu_backward(grad: Tensor, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return _aten.silu_backward(grad, x)
    s = x.sigmoid()  # silu_backward has no derivative, so use ops that have one
    return grad * s * (1 + x * (1 - s))


# (f, (gradient of f(x), x) -> gradient of x)
ACTIVATIONS: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor]]] = {
    "none": (lambda x: x, lambda g, x: g),
    "relu": (torch.relu, lambda g, x: _aten.threshold_backward(g, x, 0)),
    "gelu": (F.gelu, _aten.gelu_backward),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda g, x: _aten.gelu_backward(g, x, approximate="tanh"),
    ),
    "silu": (F.silu, _silu_backward),
}


@dataclass(frozen=True, slots=True)
class EpilogueInputs:
    """Tensors that an epilogue reads in addition to the addends; each may be absent.

    Args:
        bias: added to the sum; one number per column.
        residual: added to the sum; it has the shape of the result.
        weight: weight of the norm.
        norm_bias: bias of the norm.
    """

    bias: Tensor | None = None
    residual: Tensor | None = None
    weight: Tensor | None = None
    norm_bias: Tensor | None = None


class PartsSource(Protocol):
    """Interface by which ``reduce_from`` gets addends (parts), and gives their gradient back."""

    def open(self, tensors: Sequence[Tensor]) -> AbstractContextManager[tuple[list[Tensor], Slice]]:
        """Make the parts readable inside the block; yield (the parts, the slice of them to sum)."""
        ...

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        """Return the gradient of each tensor passed to ``open``.

        ``grad`` is the gradient of the sum, that is, of the slice.
        """
        ...


@dataclass(frozen=True, slots=True)
class Slice:
    """Index range [start, start + size) of dim ``dim``."""

    dim: int
    start: int
    size: int


@dataclass(frozen=True, slots=True)
class LocalParts:
    """Source whose parts are tensors that this rank already has.

    Args:
        kept: the slice of each part to sum.
        shape: shape of each part.
        count: number of parts.
    """

    kept: Slice
    shape: tuple[int, ...]
    count: int

    @contextmanager
    def open(self, tensors: Sequence[Tensor]) -> Iterator[tuple[list[Tensor], Slice]]:
        yield list(tensors), self.kept

    def backward(self, grad: Tensor) -> Sequence[Tensor]:
        dim, dims_after = self.kept.dim, len(self.shape) - 1 - self.kept.dim
        items_after = self.shape[dim] - self.kept.start - self.kept.size
        padded = F.pad(grad, (0, 0) * dims_after + (self.kept.start, items_after))
        return [padded] * self.count


def reduce_shards(
    parts: Sequence[Tensor],
    epilogue: Epilogue = Epilogue(),  # noqa: B008  (a value)
    given: EpilogueInputs = EpilogueInputs(),  # noqa: B008  (a value)
    kept: Slice | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Return norm(activation(scale * sum of parts + bias + residual)).

    If ``kept`` is given, only this slice of the parts is summed:

    ```
    [n, m], [n, m], ... -> [n, m]          kept=Slice(0, 1, 2):  -> [2, m], rows 1 and 2
    ```

    All is computed in one pass over the parts, which are added in their order, in float32 (float64
    for float64). ``given`` are bias, residual and the tensors of the norm. Differentiable any
    number of times.

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
    source = LocalParts(kept, tuple(parts[0].shape), len(parts))
    return reduce_from(source, parts, epilogue, given, dtype)


def reduce_from(
    source: PartsSource,
    tensors: Sequence[Tensor],
    epilogue: Epilogue,
    given: EpilogueInputs,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Do what ``reduce_shards`` does with parts that may be in the memory of other ranks.

    ``source.open(tensors)`` makes the parts readable. ``tensors`` get gradients. The other
    arguments are those of ``reduce_shards``.
    """
    inputs = (given.bias, given.residual, given.weight, given.norm_bias)
    return _ReduceParts.apply(source, epilogue, dtype, *inputs, *tensors)[0]


class _ReduceParts(torch.autograd.Function):
    """Sum of parts with an epilogue, as an autograd function.

    ```
    forward    parts -> total -> out
    backward   grad of out -> of total, by torch's ops -> of every part: the same, scaled
    ```
    """

    @staticmethod
    def forward(
        ctx: Any, source: PartsSource, epilogue: Epilogue, dtype: torch.dtype | None, *tensors: Any
    ) -> tuple[Tensor, Tensor]:
        (bias, residual, weight, norm_bias), parts = tensors[:4], tensors[4:]
        fused = epilogue.activation != "none" or epilogue.norm != "none"
        with source.open(parts) as (open_parts, summed_slice):
            out, total = native.reduce_shards(
                open_parts,
                summed_slice.dim,
                summed_slice.start,
                summed_slice.size,
                scale=epilogue.scale,
                bias=bias,
                residual=residual,
                activation=epilogue.activation,
                norm=epilogue.norm,
                normalized=epilogue.normalized,
                weight=weight,
                norm_bias=norm_bias,
                eps=epilogue.eps,
                # Backward recomputes activation and norm from the total; a plain sum needs neither.
                keep_total=fused and any(ctx.needs_input_grad),
                dtype=dtype,
            )
        ctx.source, ctx.epilogue, ctx.fused, ctx.in_dtype = source, epilogue, fused, parts[0].dtype
        ctx.save_for_backward(total, weight, norm_bias, bias)
        ctx.set_materialize_grads(False)  # an unused total has gradient None instead of zeros
        # The total is an output, so that a second derivative flows through the saved tensor.
        return out, total

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None, grad_total: Tensor | None) -> tuple:
        total, weight, norm_bias, bias = ctx.saved_tensors
        grad_weight = grad_bias = None
        if grad is not None and ctx.fused:
            grads = _epilogue_backward(ctx.epilogue, total, weight, norm_bias, grad)
            grad_total = add_optional(grad_total, grads[0])
            grad_weight, grad_bias = grads[1], grads[2]
        elif grad is not None:
            grad_total = grad
        if grad_total is None:
            return (None,) * len(ctx.needs_input_grad)
        needs = ctx.needs_input_grad
        grad_column_bias = None
        if needs[3]:
            grad_column_bias = grad_total.sum(tuple(range(grad_total.ndim - 1))).reshape(bias.shape)
            grad_column_bias = grad_column_bias.to(bias.dtype)
        parts: Sequence[Tensor | None] = [None] * (len(needs) - 7)
        if any(needs[7:]):
            scaled = grad_total if ctx.epilogue.scale == 1 else grad_total * ctx.epilogue.scale
            parts = ctx.source.backward(scaled.to(ctx.in_dtype))
        input_grads = grad_column_bias, grad_total if needs[4] else None, grad_weight, grad_bias
        return (None, None, None, *input_grads, *parts)


def add_optional(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """Return ``a + b``, where None counts as zero."""
    return b if a is None else a if b is None else a + b


def through_activation(activation: str, total: Tensor, grad: Tensor) -> Tensor:
    """Return the gradient of ``total`` from ``grad``, that of activation(total).

    It is computed by torch ops, so it can be differentiated again.
    """
    return ACTIVATIONS[activation][1](_wide(grad), _wide(total)).to(total.dtype)


def _epilogue_backward(
    epilogue: Epilogue,
    total: Tensor,
    weight: Tensor | None,
    norm_bias: Tensor | None,
    grad: Tensor,
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of total, weight and norm_bias.

    ``grad`` is that of norm(activation(total)). They are computed by torch ops, so they can be
    differentiated again.
    """
    dtype = total.dtype
    x, grad = _wide(total), _wide(grad)
    activate, slope = ACTIVATIONS[epilogue.activation]
    grad_weight = grad_bias = None
    if epilogue.norm != "none":
        y = activate(x)
        grad, grad_weight, grad_bias = _norm_backward(epilogue, y, weight, norm_bias, grad)
    return slope(grad, x).to(dtype), grad_weight, grad_bias


def _norm_backward(
    epilogue: Epilogue, y: Tensor, weight: Tensor | None, norm_bias: Tensor | None, grad: Tensor
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of y, weight and norm_bias from ``grad``, that of norm(y).

    The norm is weight * z + norm_bias with z = (y - mean) * scale. Only the part of z's gradient
    that changes neither mean nor scale reaches y.
    """
    dims = tuple(range(y.ndim - epilogue.normalized, y.ndim))
    lead = tuple(range(y.ndim - epilogue.normalized))
    if epilogue.norm == "layer":
        y = y - y.mean(dims, keepdim=True)
    scale = (y.square().mean(dims, keepdim=True) + epilogue.eps).rsqrt()
    z = y * scale
    grad_weight = None if weight is None else (grad * z).sum(lead).to(weight.dtype)
    grad_bias = None if norm_bias is None else grad.sum(lead).to(norm_bias.dtype)
    grad_z = grad if weight is None else grad * weight
    grad_y = grad_z - z * (grad_z * z).mean(dims, keepdim=True)
    if epilogue.norm == "layer":
        grad_y = grad_y - grad_z.mean(dims, keepdim=True)
    return grad_y * scale, grad_weight, grad_bias


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.float32) if x.dtype in (torch.float16, torch.bfloat16) else x
