"""Layers of which each rank has a part: tensor and expert parallelism."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from consistent import B, S

from .report import report
from .worlds import World, grads, rand


def filled(model: Any) -> Any:
    """A model of float64 with the same values in each world."""
    model = model.double()
    with torch.no_grad():
        for k, p in enumerate(model.parameters()):
            p.copy_(rand(*p.shape, seed=k) / 2)
    return model


# -- tensor parallelism ----------------------------------------------------------------------------


def _mlp() -> Any:
    return filled(nn.Sequential(nn.Linear(4, 8), nn.GELU("tanh"), nn.Linear(8, 4)))


def _mlp_there(w: World) -> Any:
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
    model = parallelize_module(_mlp(), w.mesh, plan)  # type: ignore[attr-defined]
    return model(rand(3, 4, seed=7))


@report(
    "pytorch/pytorch", 144359, "Incorrect Results with Tensor Parallelism",
    said="columns and rows of an MLP give another output",
    there=_mlp_there,
)  # fmt: skip
def columns_and_rows_of_an_mlp(w: World) -> Any:
    return w.model(_mlp(), "tensor")(rand(3, 4, seed=7))


def _local_weights_there(w: World) -> Any:
    x, weight = w.leaf(rand(3, 4), B), w.leaf(rand(4, 6, seed=1), S(1))
    out = x.to_local() @ weight.to_local()
    return grads(out.square().sum(), x)


@report(
    "pytorch/torchtitan", 1805, "TP gradient update is wrong during MoE backward",
    said="`to_local()` of a whole input: its gradient is one rank's addend",
    there=_local_weights_there,
)  # fmt: skip
def gradient_of_an_input_of_split_weights(w: World) -> Any:
    x, weight = w.leaf(rand(3, 4), B), w.leaf(rand(4, 6, seed=1), S(1))
    return grads((x @ weight).square().sum(), x)


@report(
    "pytorch/torchtitan", 4332, "Fix rowwise TP bias gradients",
    said="the bias is divided by the ranks, and so is its gradient",
)  # fmt: skip
def bias_of_split_rows(w: World) -> Any:
    x, weight = w.leaf(rand(3, 6), S(1)), w.leaf(rand(4, 6, seed=1), S(1))
    bias = w.leaf(rand(4, seed=2), B)
    out = F.linear(x, weight, bias)
    return [out, *grads(out.square().sum(), weight, bias)]


@report(
    "pytorch/torchtitan", 4637, "Fix padding gradients in vocab-parallel embeddings",
    said="token 37 is taken for the padding token 5 of another shard",
)  # fmt: skip
def padding_in_a_split_vocabulary(w: World) -> Any:
    weight = w.leaf(rand(8, 3), S(0))
    tokens = w.lay(torch.tensor([[1, 5, 1], [5, 7, 0]]), B)
    out = F.embedding(tokens, weight, padding_idx=1)
    return [out, *grads(out.square().sum(), weight)]


@report(
    "NVIDIA/Megatron-LM", 1446, "[BUG] final_layernorm gradient mismatch when TP+SP enabled",
    said="ranks have other gradients of the norm's weight",
)  # fmt: skip
def norm_over_a_split_sequence(w: World) -> Any:
    x = w.leaf(rand(2, 7, 4), S(1))
    weight, bias = w.leaf(rand(4, seed=1), B), w.leaf(rand(4, seed=2), B)
    out = F.layer_norm(x, (4,), weight, bias)
    return grads(out.square().sum(), x, weight, bias)


@report(
    "Oneflow-Inc/oneflow", 10561, "fix layernorm grad sbp",
    said="gradients of gamma and beta are taken for split ones",
)  # fmt: skip
def norm_over_a_split_batch(w: World) -> Any:
    x, weight = w.leaf(rand(5, 4), S(0)), w.leaf(rand(4, seed=1), B)
    bias = w.leaf(rand(4, seed=2), B)
    return grads(F.layer_norm(x, (4,), weight, bias).square().sum(), x, weight, bias)


@report(
    "NVIDIA/Megatron-LM", 1464, "[BUG] Wrong attention gradient when Context Parallelism is on",
    said="gradients of queries, keys and values differ from those of one device",
)  # fmt: skip
def attention_over_a_split_sequence(w: World) -> Any:
    q, k, v = (w.leaf(rand(2, 2, 6, 4, seed=n), S(2)) for n in range(3))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return [out, *grads(out.square().sum(), q, k, v)]


@report(
    "pytorch/pytorch", 134050,
    "DTensor sharding propagation for `scaled_dot_product_efficient_attention` should be more "
    "conservatively cached",
    said="after a frozen layer the next one's gradients are wrong",
    there=None,
)  # fmt: skip
def attention_after_a_frozen_layer(w: World) -> Any:
    frozen = [w.lay(rand(2, 4, 6, 4, seed=n), S(1)) for n in range(3)]
    F.scaled_dot_product_attention(*frozen)
    q, k, v = (w.leaf(rand(2, 4, 6, 4, seed=n), S(1)) for n in range(3))
    return grads(F.scaled_dot_product_attention(q, k, v).square().sum(), q, k, v)


# -- experts ---------------------------------------------------------------------------------------


class Experts(nn.Module):
    """Tokens choose two of four experts; ``batched`` gathers the weights of each choice."""

    def __init__(self, batched: bool) -> None:
        super().__init__()
        self.router = nn.Linear(4, 4, bias=False)
        self.up = nn.Parameter(torch.empty(4, 4, 6))
        self.down = nn.Parameter(torch.empty(4, 6, 4))
        self.batched = batched

    def forward(self, x: Tensor) -> Tensor:
        weights, chosen = self.router(x).softmax(-1).topk(2, dim=-1)
        weights = weights / weights.sum(-1, keepdim=True)
        if self.batched:
            up, down = self.up[chosen], self.down[chosen]
            hidden = torch.einsum("ti,tkij->tkj", x, up).relu()
            return (torch.einsum("tkj,tkjo->tko", hidden, down) * weights[..., None]).sum(1)
        out = torch.zeros_like(x)
        for e in range(4):
            mine = (weights * (chosen == e)).sum(-1, keepdim=True)
            out = out + ((x @ self.up[e]).relu() @ self.down[e]) * mine
        return out


def _experts(w: World, batched: bool) -> Any:
    model = w.model(filled(Experts(batched)), {"up": S(0), "down": S(0)})
    out = model(rand(6, 4, seed=8))
    out.square().sum().backward()
    return [out, *(p.grad for p in model.parameters())]


@report(
    "huggingface/transformers", 48205,
    "Fix expert-parallel training: NaN gradients and missing gradient contributions",
    said="the router's gradient is that of one rank's experts",
    there=None,
)  # fmt: skip
def router_of_split_experts(w: World) -> Any:
    return _experts(w, batched=False)


@report(
    "huggingface/transformers", 48687,
    'Wrong router gradient with `experts_implementation="batched_mm"` under expert parallelism',
    said="the loss is right and the router's gradient is not",
    there=None,
)  # fmt: skip
def router_of_split_experts_in_one_product(w: World) -> Any:
    return _experts(w, batched=True)


@report(
    "pytorch/pytorch", 160285, "Wrong-size gradients in Expert Parallel MoE",
    said="gradients of experts are twice as large on two ranks",
    there=None,
)  # fmt: skip
def gradients_of_split_experts(w: World) -> Any:
    model = w.model(filled(Experts(batched=False)), {"up": S(0), "down": S(0)})
    x = w.lay(rand(6, 4, seed=8), S(0))  # other tokens on each rank
    model(x).square().mean().backward()
    return [model.up.grad, model.down.grad]


class Choice(nn.Module):
    """Rows go through one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 2), nn.Linear(3, 2)

    def forward(self, x: Tensor, takes_a: Tensor) -> Tensor:
        return torch.where(takes_a[:, None], self.a(x), self.b(x))


@report(
    "pytorch/pytorch", 158719, "FSDP Fails when parameters are used differently across ranks",
    said="ranks send other gradients, and wait for ever",
    there=None,
)  # fmt: skip
def layers_that_one_rank_uses(w: World) -> Any:
    model = w.model(filled(Choice()), "zero3")
    x, takes_a = w.lay(rand(4, 3), S(0)), w.lay(torch.arange(4) < 2, S(0))
    model(x, takes_a).square().mean().backward()
    return [p.grad for p in model.parameters()]
