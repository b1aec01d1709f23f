"""Two layers, then a GPT block, cut over two ranks, with this library.

    torchrun --standalone --nproc_per_node 2 docs/comparison/ours.py

With ``--wrong dim``, ``cut``, ``inputs`` or ``heads`` something is said wrongly.
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from model import MLP, WRONG, Block, adamw, job, told

import consistent
from consistent import S


def train(kind: type, plan: object) -> str:
    model, x, y = job(kind)
    if WRONG == "inputs":
        x = x + dist.get_rank()
    model = consistent.parallelize(model, consistent.Placement.all("cpu"), plan)
    optimizer, losses = adamw(model), []
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
    plan = {"up.*": S(0), "down.weight": S(1)}
    if WRONG == "dim":
        plan["up.*"] = S(2)
    if WRONG == "cut":
        plan["down.weight"] = S(0)
    lines = [train(MLP, plan), train(Block, "tensor")]
    if dist.get_rank() == 0:
        print(*lines, sep="\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
