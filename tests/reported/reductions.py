"""Sums, means, norms and extremes of split and partial tensors."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from consistent import S

from .report import report
from .worlds import World, rand


@report(
    "pytorch/pytorch", 162692, "Incorrect results of DTensor.mean with uneven sharding",
    said="the mean of 3 rows on 2 ranks counts each rank alike",
)  # fmt: skip
def mean_of_uneven_shards(w: World) -> Any:
    return w.lay(torch.arange(12.0).view(3, 4), S(0)).mean()


@report(
    "pytorch/pytorch", 159856, "[dtensor] fix incorrect norm calculation for Partial DTensors",
    said="the norm of a sum that was not added up is the sum of norms",
)  # fmt: skip
def norm_of_addends(w: World) -> Any:
    product = w.lay(rand(4, 6), S(1)) @ w.lay(rand(6, 3, seed=1), S(0))
    return torch.linalg.vector_norm(product)


@report(
    "pytorch/pytorch", 163193, "Incorrect results when adding partial DTensor with a scalar",
    said="each rank adds the number: 65 for 55",
)  # fmt: skip
def number_added_to_addends(w: World) -> Any:
    return w.lay(torch.arange(10.0), S(0)).sum() + 10


@report(
    "pytorch/pytorch", 153603,
    "[DTensor] Scalar multiplication after reduction doesn't update result without calling "
    ".full_tensor() before",
    said="the first product is cached and given again for other factors",
)  # fmt: skip
def products_with_several_numbers(w: World) -> Any:
    x = w.lay(torch.arange(4.0), S(0))
    return [x.mean() * factor for factor in (1, 2, 3)]


@report(
    "pytorch/pytorch", 164729,
    "Fix inplace ops on Partial DTensors to preserve aliasing semantics",
    said="`clamp_` leaves the value as it was: 144 for 2",
)  # fmt: skip
def addends_clamped_in_place(w: World) -> Any:
    total = w.lay(torch.arange(12.0), S(0)).sum()
    return total.clamp_(max=2)


@report(
    "pytorch/pytorch", 168940, "[DTensor] aten.max.dim returns wrong indices when using DTensor",
    said="indices are those in one rank's shard",
)  # fmt: skip
def indices_of_the_largest(w: World) -> Any:
    return list(torch.max(w.lay(rand(4, 6), S(1)), dim=1))


@report(
    "pytorch/pytorch", 173936, "[DTensor] Fix argmax/argmin sharding strategy",
    said="the largest of the ranks' own indices: 1 for 0",
)  # fmt: skip
def argmax_and_argmin(w: World) -> Any:
    x = w.lay(torch.tensor([10.0, 5.0, 3.0, 8.0]), S(0))
    return [x.argmax(), x.argmin()]


def _clipped(w: World, scale: float, largest: float) -> Any:
    p = w.leaf(rand(4, 3), S(0))
    (p * p).sum().mul(scale).backward()
    norm = nn.utils.clip_grad_norm_([p], largest)
    return [p.grad, norm]


@report(
    "pytorch/pytorch", 149768,
    "[FSDP2][DTensor] numeric bug for DTensor + python float in gradient clipping",
    said="each rank adds the 1e-6 in clipping's divisor",
)  # fmt: skip
def clipping_of_small_gradients(w: World) -> Any:
    return _clipped(w, 1e-7, 1e-7)


def _norm_that_fsdp2_returns(w: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = nn.Sequential(nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(rand(3, 4))
        model[0].bias.copy_(rand(3, seed=1))
    fully_shard(model, mesh=w.mesh)  # type: ignore[attr-defined]
    model(rand(6, 4, seed=2)).square().sum().backward()
    norm: Any = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return norm.to_local()


@report(
    "pytorch/pytorch", 170862, "Bug: clip_grad_norm_ doesn't work with FSDP2",
    said="the norm that is returned is one rank's",
    there=_norm_that_fsdp2_returns,
)  # fmt: skip
def norm_that_clipping_returns(w: World) -> Any:
    model: Any = nn.Sequential(nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].weight.copy_(rand(3, 4))
        model[0].bias.copy_(rand(3, seed=1))
    model = w.model(model, "zero3")
    model(rand(6, 4, seed=2)).square().sum().backward()
    return nn.utils.clip_grad_norm_(model.parameters(), 1.0)


@report(
    "jax-ml/jax", 21403, "jnp.cumsum is incorrect when sharding over summing axis on GPUs",
    said="sums begin again on each device",
)  # fmt: skip
def running_sums(w: World) -> Any:
    return w.lay(torch.ones(2, 9), S(1)).cumsum(1)


@report(
    "jax-ml/jax", 19271, "top_k incorrect results on GPU mesh",
    said="the largest of one is not the largest of four",
)  # fmt: skip
def largest_of_a_split_dim(w: World) -> Any:
    x = w.lay(rand(2, 17), S(1))
    return [*x.topk(1), *x.topk(4)]
