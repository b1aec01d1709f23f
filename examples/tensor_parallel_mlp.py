# Look at: PLAN. With the first layer's weight cut by rows and the second's by columns, nothing
# moves between them. The second layer sums over a cut dim, so its result is P, and the only
# all-reduce of the forward pass runs when the sum is needed.
#
#     torchrun --standalone --nproc_per_node 2 examples/tensor_parallel_mlp.py

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import consistent
from consistent import B, S

PLAN = {"up.*": S(0), "down.weight": S(1)}


class MLP(nn.Module):
    """f32[n, 32] -> f32[n, 32]."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(32, 128)
        self.down = nn.Linear(128, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


def gradients(model: nn.Module, x: Tensor) -> list[Tensor]:
    model(x).square().mean().backward()
    return [p.grad for p in model.parameters()]


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    everywhere = consistent.Placement.all("cpu")

    torch.manual_seed(0)
    single = MLP()
    x = torch.randn(8, 32)
    torch.manual_seed(0)
    parallel = consistent.parallelize(MLP(), everywhere, PLAN)
    x_global = consistent.distribute(x, everywhere, B)

    with consistent.report() as forward, torch.no_grad():
        y = parallel(x_global)
        y.to_global(sbp=B)
    expected, found = gradients(single, x), gradients(parallel, x_global)
    gap = max((g.full() - e).abs().max().item() for g, e in zip(found, expected))
    if dist.get_rank() == 0:
        print(f"result: {y.sbp[0]}; boxings in forward: {dict(forward.boxings())}")
        print(f"gradients as on one device; largest difference: {gap:.1e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
