# Look at: the training step is that of one device; splitting the batch is all that makes it data
# parallel. Parameters are B. Their gradients come out of backward as P and are summed in buckets,
# as DistributedDataParallel does.
#
#     torchrun --standalone --nproc_per_node 2 examples/data_parallel.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import S

STEPS, BATCH = 20, 25  # two ranks cannot share such a batch evenly: they get 13 and 12


def build() -> nn.Module:
    """A model with the same initial values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 4))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere = consistent.Placement.all("cpu")

    single = build()
    parallel = consistent.parallelize(build(), everywhere)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (single, parallel)]
    gap = 0.0
    for _ in range(STEPS):
        x, y = torch.randn(BATCH, 16), torch.randn(BATCH, 4)
        expected = step(single, optimizers[0], x, y)
        x, y = (consistent.distribute(t, everywhere, S(0)) for t in (x, y))
        gap = max(gap, abs(step(parallel, optimizers[1], x, y) - expected))
    if dist.get_rank() == 0:
        print(f"loss as on one device; largest difference in {STEPS} steps: {gap:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
