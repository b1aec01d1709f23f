# Look at: PLAN. With parameters S(0), gradients and optimizer state are S(0) too, because each
# follows the tensor it belongs to: every rank keeps and updates its share. A layer gathers its
# weight when it runs, and the weight's gradient is reduce-scattered.
#
#     torchrun --standalone --nproc_per_node 2 examples/sharded_optimizer.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import S

PLAN = {"*": S(0)}


def build() -> nn.Module:
    """A model with the same initial values on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 8))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> float:
    optimizer.zero_grad()
    loss = F.mse_loss(model(x), y)
    loss.backward()
    optimizer.step()
    return loss.item()


def held_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Bytes of AdamW's two moments on this rank."""
    moments = [s[name] for s in optimizer.state.values() for name in ("exp_avg", "exp_avg_sq")]
    local = [m.to_local() if isinstance(m, consistent.GlobalTensor) else m for m in moments]
    return sum(m.nbytes for m in local)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere = consistent.Placement.all("cpu")

    single, sharded = build(), consistent.parallelize(build(), everywhere, PLAN)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (single, sharded)]
    gap = 0.0
    for _ in range(10):
        x, y = torch.randn(64, 32), torch.randn(64, 8)
        expected = step(single, optimizers[0], x, y)
        x, y = (consistent.distribute(t, everywhere, S(0)) for t in (x, y))
        gap = max(gap, abs(step(sharded, optimizers[1], x, y) - expected))
    whole, share = map(held_bytes, optimizers)
    if dist.get_rank() == 0:
        print(f"loss as on one device; largest difference: {gap:.1e}")
        print(f"optimizer state on this rank: {share} bytes of {whole}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
