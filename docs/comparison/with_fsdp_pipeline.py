"""Two layers with FSDP2, whose ranks share parameters and batch; then a GPT block as two stages of
torch's pipelining, FSDP2 within each. Neither cuts a product: that is DTensor's part.

    torchrun --standalone --nproc_per_node 2 docs/comparison/with_fsdp_pipeline.py

With ``--wrong dim``, ``cut``, ``inputs`` or ``heads`` something is said wrongly.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import MLP, WIDTH, WRONG, Block, adamw, job, told
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe
from torch.distributed.tensor import Shard


class Half(nn.Module):
    """One of the two residual parts of a block: a stage."""

    def __init__(self, norm: nn.Module, inner: nn.Module) -> None:
        super().__init__()
        self.norm, self.inner = norm, inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


def sharded() -> str:
    model, x, y = job(MLP)
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(model, mesh=mesh, shard_placement_fn=lambda p: Shard(2 if WRONG == "dim" else 0))
    rank = dist.get_rank()
    if WRONG == "inputs":
        x = x + rank
    x, y = x.chunk(2)[rank], y.chunk(2)[rank]  # equal parts: gradients are averaged over ranks
    optimizer, losses = adamw(model), []
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / 2
        dist.all_reduce(mean)
        losses.append(mean.item())
    return told(MLP, losses)


def staged() -> str:
    model, x, y = job(Block)
    assert isinstance(model, Block)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("dp", "pp"))
    rank = mesh["pp"].get_local_rank()
    parts = (Half(model.norm1, model.attention), Half(model.norm2, model.mlp))
    part = parts[rank]
    fully_shard(part, mesh=mesh["dp"])
    width = WIDTH // 2 if WRONG == "cut" else WIDTH
    stage = PipelineStage(
        part, rank, 2, torch.device("cpu"), torch.empty(4, 6, width), group=mesh["pp"].get_group()
    )
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    optimizer, losses = adamw(part), []
    for _ in range(2):
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(x)
            mean = torch.zeros(())
        else:
            parts_of_loss: list[torch.Tensor] = []
            schedule.step(target=y, losses=parts_of_loss)
            mean = torch.stack(parts_of_loss).mean().detach()
        optimizer.step()
        dist.broadcast(mean, 1)
        losses.append(mean.item())
    return told(Block, losses)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    lines = [sharded(), staged()]
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
