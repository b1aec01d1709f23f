"""Training under plans by name has the losses of training on one rank: a GPT, a mixture of experts
whose tokens are sent, also to experts that lie on several ranks, matrices that their owners step,
and tables with sparse gradients whose rows are fetched from their owners.

The GPT is in float64; experts in float32, as torch's grouped product has no float64; Muon's
products in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import consistent
from benchmarks.gpt import GPT
from consistent.spec import B, Placement, S, Sbp
from tests.gpu.training import compare, gpt
from tests.gpu.world import start

STEPS, LAYERS = 4, 2
CLOSE, CLOSE_OF_FLOAT, CLOSE_OF_MUON = 1e-10, 1e-5, 2e-2
PLANS = ("data", "zero1", "zero2", "zero3", "tensor")
DIM, EXPERTS, TOKENS = 16, 4, 96
ROWS, BATCH, BAG = 1001, 16, 5

Optimizer = Callable[[nn.Module], torch.optim.Optimizer]


def mixture() -> nn.Module:
    """The mixture of a Mixtral; each token goes to two experts."""
    import transformers

    config = transformers.MixtralConfig(
        hidden_size=DIM, intermediate_size=2 * DIM, num_hidden_layers=1, vocab_size=8,
        num_local_experts=EXPERTS, num_experts_per_tok=2, num_attention_heads=1,
        num_key_value_heads=1,
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config).model.layers[0].mlp


def matrices() -> nn.Module:
    return nn.Sequential(*(nn.Linear(DIM, DIM, bias=False) for _ in range(3)))


def trained(
    make: Callable[[], nn.Module], optimizer: Optimizer, placement: Placement, plan: Any, split: Any
) -> list[float]:
    """Losses of a model [., TOKENS, DIM] -> [., TOKENS, DIM]."""
    torch.manual_seed(0)
    model = consistent.parallelize(make().to(torch.get_default_dtype()), placement, plan)
    steps, losses = optimizer(model), []
    x, y = (torch.randn(4, TOKENS, DIM) for _ in range(2))
    x, y = (consistent.distribute(each, placement, split) for each in (x, y))
    for _ in range(STEPS):
        steps.zero_grad()
        loss = (model(x) - y).square().mean()
        loss.backward()
        steps.step()
        losses.append(loss.item())
    return losses


def tables(optimizer: Any, placement: Placement, rows: Sbp) -> list[float]:
    """Losses of a table of which both the rows and the batch [BATCH, BAG] are split."""
    torch.manual_seed(0)
    table, head = nn.Embedding(ROWS, DIM, sparse=True), nn.Linear(DIM, 3)
    model = consistent.parallelize(nn.Sequential(table, head), placement, {"0.weight": S(0)})
    steps = [optimizer([table.weight], lr=0.1), torch.optim.SGD(head.parameters(), lr=0.1)]
    indices, targets = torch.randint(0, ROWS, (BATCH, BAG)), torch.randint(0, 3, (BATCH, BAG))
    x, y = (consistent.distribute(each, placement, rows) for each in (indices, targets))
    losses = []
    for _ in range(STEPS):
        model.zero_grad()
        loss = nn.functional.cross_entropy(model(x).flatten(0, 1), y.flatten())
        loss.backward()
        for each in steps:
            each.step()
        losses.append(loss.item())
    return losses


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


def muon(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Muon(model.parameters(), lr=1e-2)


def main() -> None:
    world = start(__doc__)
    torch.set_default_dtype(torch.float64)
    GPT.layers = LAYERS
    everywhere, first = (Placement(world.device, range(n)) for n in (world.size, 1))
    alone = gpt(first, "data", B, STEPS)
    for plan in PLANS:
        split = B if plan == "tensor" else S(0)
        compare(world, f"GPT, {plan}", gpt(everywhere, plan, split, STEPS), alone, CLOSE)
    torch.set_default_dtype(torch.float32)
    alone = trained(mixture, adamw, first, "data", B)
    for plan in ("data", "zero3", "expert"):
        losses = trained(mixture, adamw, everywhere, plan, S(0))
        compare(world, f"experts, {plan}", losses, alone, CLOSE_OF_FLOAT)
    if world.size == 4:
        grid = Placement(world.device, [[0, 1], [2, 3]], axes=("ep", "tp"))
        losses = trained(mixture, adamw, grid, {"ep": "zero3+expert", "tp": "tensor"}, (S(0), B))
        compare(world, "experts that tensor splits", losses, alone, CLOSE_OF_FLOAT)
    for optimizer in (torch.optim.SparseAdam, torch.optim.Adagrad):
        alone = tables(optimizer, everywhere, B)
        name = f"sparse tables, {optimizer.__name__}"
        compare(world, name, tables(optimizer, everywhere, S(0)), alone, CLOSE_OF_FLOAT)
    alone = trained(matrices, muon, first, "data", B)
    for plan in ("data", "zero2", "zero3"):
        losses = trained(matrices, muon, everywhere, plan, S(0))
        compare(world, f"Muon, {plan}", losses, alone, CLOSE_OF_MUON)
    world.end()


if __name__ == "__main__":
    main()
