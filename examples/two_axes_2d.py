# Look at: the grid has two axes, and every tensor has one SBP for each. Along "data" the batch is
# cut and parameters are whole; along "model" the layers are cut and the batch is whole. Each axis
# does its own reductions, over its own ranks.
#
#     torchrun --standalone --nproc_per_node 4 examples/two_axes_2d.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, S

PLAN = {"0.*": (B, S(0)), "2.weight": (B, S(1))}  # every other parameter is (B, B)
BATCH = (S(0), B)


def build() -> nn.Module:
    """A model with the same initial values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 5))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    grid = consistent.placement("cpu", ranks=[[0, 1], [2, 3]], axes=("data", "model"))

    single, parallel = build(), consistent.parallelize(build(), grid, PLAN)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (single, parallel)]
    gap = 0.0
    for _ in range(5):
        x, y = torch.randn(12, 16), torch.randint(5, (12,))
        expected = step(single, optimizers[0], x, y)
        x, y = (consistent.distribute(t, grid, BATCH) for t in (x, y))
        with consistent.report() as ran:
            found = step(parallel, optimizers[1], x, y)
        gap = max(gap, abs(found - expected))
    if dist.get_rank() == 0:
        print(f"one step:\n{ran}\n")
        print(f"loss as on one device; largest difference: {gap:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
