"""What ranks share: tied weights, statistics of a batch norm, random numbers."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import consistent
from consistent import B, S

from .models import filled
from .report import report
from .worlds import World, integers, rand

# -- tied weights ----------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding of 5 tokens, which is the head as well."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(5, 4), nn.Linear(4, 5, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(tokens)))


def _trained(model: Any, tokens: Any, labels: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(2):
        optimizer.zero_grad()
        F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
    return list(model.parameters())


def _tied_there(w: World) -> Any:
    from torch.distributed.fsdp import fully_shard

    model: Any = filled(Tied())
    for part in (model.embedding, model.head, model):
        fully_shard(part, mesh=w.mesh)  # type: ignore[attr-defined]
    return _trained(model, integers(5, 6, 3), integers(5, 6, 3, seed=1))


@report(
    "pytorch/pytorch", 176076,
    "A portion of shared parameter is not being update when sharding is uneven over FSDP2",
    said="the last rank's rows are never updated",
    there=_tied_there,
)  # fmt: skip
def tied_weight_of_uneven_shards(w: World) -> Any:
    model = w.model(filled(Tied()), "zero3")
    return _trained(model, *(w.lay(integers(5, 6, 3, seed=n), S(0)) for n in (0, 1)))


@report(
    "huggingface/accelerate", 4171,
    "Fix FSDP2 tied-embedding models on torch >= 2.13: put the output embedding in the same "
    "fully_shard group",
    said="raises at the first forward",
    there=_tied_there,
)  # fmt: skip
def tied_weight_split_by_tokens(w: World) -> Any:
    model = w.model(filled(Tied()), "tensor")
    return _trained(model, *(w.lay(integers(5, 6, 3, seed=n), B) for n in (0, 1)))


# -- batch norm ------------------------------------------------------------------------------------


def _normed() -> Any:
    return filled(nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)))


def _normed_there(w: World) -> Any:
    from torch.nn.parallel import DistributedDataParallel

    model = DistributedDataParallel(_normed())
    mine = rand(8, 4, seed=5).chunk(dist.get_world_size())[dist.get_rank()]
    model(mine).square().mean().backward()
    return [p.grad for p in model.parameters()] + list(model.module.buffers())


@report(
    "Lightning-AI/pytorch-lightning", 6789,
    "DDP with 2 GPUs doesn't give same results as 1 GPU with the same effective batch size",
    said="statistics of a batch norm are those of each rank's rows",
    there=_normed_there,
)  # fmt: skip
def batch_norm_of_a_split_batch(w: World) -> Any:
    model = w.model(_normed(), "data")
    model(w.lay(rand(8, 4, seed=5), S(0))).square().mean().backward()
    return [p.grad for p in model.parameters()] + list(model.buffers())


@report(
    "pytorch/pytorch", 62967,
    "BatchNorm2d + SyncBatchNorm incorrect multi gpu behaviour in 1.10.0 (tested working in 1.8.0)",
    said="of a permuted input, ranks normalise by other numbers",
    there=None,
)  # fmt: skip
def batch_norm_of_a_permuted_input(w: World) -> Any:
    model = w.model(filled(nn.BatchNorm2d(3)), "data")
    x = w.lay(rand(5, 4, 3, 2), S(0))
    return [model(x.permute(0, 2, 1, 3)).permute(0, 2, 1, 3), *model.buffers()]


# -- random numbers --------------------------------------------------------------------------------


def _alike(draw: Any, read: Any) -> Tensor:
    """1, and beside it how far the numbers under two layouts are from those under the first."""
    drawn = []
    for sbp in (B, S(0), S(1)):
        torch.manual_seed(0)
        drawn.append(read(draw(sbp)))
    return torch.stack([torch.tensor(1.0), *((x - drawn[0]).abs().max() for x in drawn[1:])])


@report(
    "pytorch/pytorch", 168058,
    "[DTensor] inconsistency of distributed RNG (Shard(0) != Shard(1) or 8 GPU != 4 GPU != 1 GPU)",
    said="numbers depend on the layout and on the number of ranks (on a CPU DTensor warns of it)",
)  # fmt: skip
def initial_values_under_each_layout(w: World) -> Any:
    return _alike(lambda sbp: nn.init.normal_(w.lay(torch.zeros(4, 6), sbp)), w.read)


@report(
    "jax-ml/jax", 21232, "Numerical differences between shardings in random algorithm",
    said="initial values depend on the mesh",
    there=None,
)  # fmt: skip
def numbers_under_each_layout(w: World) -> Any:
    def draw(sbp: Any) -> Any:
        if type(w) is World:
            return torch.rand(4, 6)
        return consistent.rand(4, 6, placement=w.placement, sbp=sbp)  # type: ignore[attr-defined]

    return _alike(draw, w.read)


@report(
    "NVIDIA/Megatron-LM", 1256, "[QUESTION] Effect of sequence parallel with dropout rng context",
    said="dropout of a split sequence draws in the wrong context",
    there=None,
)  # fmt: skip
def dropout_under_each_layout(w: World) -> Any:
    return _alike(lambda sbp: F.dropout(w.lay(torch.ones(4, 6), sbp), 0.5), w.read)


@report(
    "Oneflow-Inc/oneflow", 7340, "[Bug] flow.rand init as global tensor error",
    said="raises where the shape has a dim of 1",
)  # fmt: skip
def numbers_of_a_broadcast_shape(w: World) -> Any:
    x = w.lay(rand(6, 4), S(0))
    kept = torch.rand_like(x[:, :1]) < 2  # all of them
    return x * kept
