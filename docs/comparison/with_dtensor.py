"""The same with DTensor and torch's tensor parallel plans.

    torchrun --standalone --nproc_per_node 2 docs/comparison/with_dtensor.py

With ``--wrong dim``, ``cut``, ``inputs`` or ``heads`` something is said wrongly.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import MLP, WRONG, Block, adamw, job, told
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def train(kind: type, plan: dict) -> str:
    model, x, y = job(kind)
    if WRONG == "inputs":
        x = x + dist.get_rank()
    mesh = init_device_mesh("cpu", (2,))
    parallelize_module(model, mesh, plan)
    # The norms stay plain tensors, and a fused optimizer takes DTensors or tensors, not both.
    optimizer, losses = adamw(model, foreach=False), []
    for _ in range(2):
        loss = F.mse_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return told(kind, losses)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    mlp = {"up": ColwiseParallel(), "down": RowwiseParallel()}
    if WRONG == "dim":
        mlp["down"] = RowwiseParallel(input_layouts=Shard(3))
    if WRONG == "cut":
        mlp["down"] = ColwiseParallel()
    lines = [train(MLP, mlp)]
    block = {f"attention.{name}": ColwiseParallel() for name in ("query", "key", "value")}
    block |= {"attention.out": RowwiseParallel()}
    block |= {"mlp.up": ColwiseParallel(), "mlp.down": RowwiseParallel()}
    lines.append(train(Block, block))
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
