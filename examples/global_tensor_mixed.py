# Look at: StageModule's placement and sbp. The first stage is data parallel on ranks 0 and 1, the
# second model parallel on ranks 2 and 3, and to_global between them joins the pieces and sends them
# on. The training loop is the same as on one device.
#
#     torchrun --standalone --nproc_per_node 4 examples/global_tensor_mixed.py

import torch
import torch.distributed as dist
from torch import nn

import consistent
from consistent import B, S


class StageModule(nn.Module):
    def __init__(self, in_dims, out_dims, placement=None, sbp=None):
        super().__init__()
        self.w = nn.Parameter(consistent.randn(in_dims, out_dims, placement=placement, sbp=sbp))

    def forward(self, x):
        return torch.matmul(x, self.w)


class ModuleModel(nn.Module):
    def __init__(self, first, second):
        super().__init__()
        self.second = second
        self.m_stage0 = StageModule(5, 8, placement=first, sbp=B)
        self.m_stage1 = StageModule(8, 3, placement=second, sbp=S(1))

    def forward(self, x):
        out_stage0 = self.m_stage0(x)
        in_stage1 = out_stage0.to_global(placement=self.second, sbp=B)
        return out_stage0, self.m_stage1(in_stage1)


def curve(first, second):
    """The losses of ten steps, and the shapes of the outputs."""
    torch.manual_seed(0)
    model = ModuleModel(first, second)
    in_stage0 = consistent.randn(4, 5, placement=first, sbp=S(0))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(10):
        outs = model(in_stage0)
        loss = outs[1].square().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, [tuple(out.shape) for out in outs]


def main():
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ranks = [consistent.placement("cpu", r) for r in ([0, 1], [2, 3], [0])]
    found, shapes = curve(ranks[0], ranks[1])
    expected, _ = curve(ranks[2], ranks[2])
    gap = max(abs(f - e) / e for f, e in zip(found, expected))
    if dist.get_rank() == 0:
        print(*shapes)  # (4, 8) (4, 3)
        print(
            f"loss {found[0]:.2f} to {found[-1]:.2f}, as on one device; largest relative "
            f"difference: {gap:.1e}"
        )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
