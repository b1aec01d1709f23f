"""What an op on a global tensor costs over plain torch, beside DTensor, measured in turn in one
process.

    python benchmarks/overhead.py
        one process, one gloo rank: nothing is sent, so this is pure overhead
    torchrun --nproc_per_node 2 benchmarks/overhead.py
        each rank's shard has the plain tensor's shape
    python benchmarks/overhead.py --device cuda
        one NCCL rank

On CUDA a time is taken only when the device has finished. On a shared machine the ratios count, not
the microseconds.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import consistent
from benchmarks.device_time import Run, wait
from benchmarks.process_group import start
from consistent import B, S

Make = Callable[[torch.Tensor, str], torch.Tensor]
SIZE = 8


def timed(run: Run, seconds: float, device: str) -> float:
    """Microseconds for a call, measured over as many calls as fit into ``seconds``."""
    count, spent = 1, 0.0
    while True:
        wait(device)
        start = time.perf_counter()
        for _ in range(count):
            run()
        wait(device)
        spent = time.perf_counter() - start
        if spent > seconds / 4:
            return spent / count * 1e6
        count = max(count + 1, int(count * seconds / max(spent, 1e-7) / 2))


def in_turn(runs: dict[str, Run], rounds: int, seconds: float, device: str) -> dict[str, float]:
    """Microseconds of each in its fastest round. The rounds alternate, so that a drift of the
    machine affects all equally; on a shared machine the fastest round is the least disturbed
    one."""
    for run in runs.values():
        run()
    taken: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(rounds):
        for name, run in runs.items():
            taken[name].append(timed(run, seconds, device))
    return {name: min(times) for name, times in taken.items()}


def ops(make: Make) -> dict[str, Run]:
    """Single ops; the data is split along the batch dim, weights are broadcast."""
    x, y = make(torch.randn(SIZE, SIZE), "data"), make(torch.randn(SIZE, SIZE), "data")
    w, b = make(torch.randn(SIZE, SIZE), "weight"), make(torch.randn(SIZE), "weight")
    return {
        "add": lambda: x + y,
        "relu": lambda: torch.relu(x),
        "x * 2.0": lambda: x * 2.0,
        "matmul": lambda: x @ w,
        "linear": lambda: F.linear(x, w, b),
        "layer_norm": lambda: F.layer_norm(x, (SIZE,), b, b),
        "layer_norm, no weights": lambda: F.layer_norm(x, (SIZE,)),
        "softmax": lambda: F.softmax(x, dim=-1),
        "view": lambda: x.view(-1, 2, SIZE // 2),
        "transpose": lambda: x.transpose(0, 1),
        "cat": lambda: torch.cat([x, y], dim=1),
        "indexing": lambda: x[:, 1:3],
    }


class Block(nn.Module):
    """A pre-norm transformer block."""

    def __init__(self, dim: int, heads: int):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, s, d = x.shape
        q, k, v = (
            self.qkv(self.norm1(x))
            .view(b, s, 3, self.heads, d // self.heads)
            .permute(2, 0, 3, 1, 4)
            .unbind(0)
        )
        # Written out, as DTensor has no rule for the backward of scaled_dot_product_attention on
        # CPU.
        a = F.softmax(q @ k.transpose(-2, -1) * self.scale, dim=-1) @ v
        x = x + self.proj(a.transpose(1, 2).reshape(b, s, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def step(module: nn.Module, x: torch.Tensor) -> Run:
    """Forward and backward."""

    def run() -> None:
        module.zero_grad(set_to_none=True)
        module(x).sum().backward()

    return run


def replace_parameters(module: nn.Module, make: Make) -> nn.Module:
    """Replace every parameter of ``module`` by what ``make`` returns for it."""
    for owner in module.modules():
        for name, value in list(owner._parameters.items()):
            if value is not None:
                owner._parameters[name] = nn.Parameter(make(value.detach().clone(), "weight"))
    return module


def models(make: Make) -> dict[str, Run]:
    """Forward and backward of whole modules."""
    torch.manual_seed(0)
    mlp = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
    block, narrow = Block(64, 4), Block(32, 4)
    return {
        "MLP fwd + bwd": step(replace_parameters(mlp, make), make(torch.randn(8, 16), "data")),
        "block fwd + bwd": step(
            replace_parameters(block, make), make(torch.randn(4, 32, 64), "data")
        ),
        "block of dim 32": step(
            replace_parameters(narrow, make), make(torch.randn(4, 16, 32), "data")
        ),
    }


def optimizers(make: Make) -> dict[str, Run]:
    """A step of AdamW on 300 small parameters, in each way that torch implements it."""

    def stepped(**how: bool) -> Run:
        parameters = [nn.Parameter(make(torch.randn(16, 16), "weight")) for _ in range(300)]
        for p in parameters:
            p.grad = make(torch.randn(16, 16), "weight")
        return torch.optim.AdamW(parameters, **how).step

    return {
        "AdamW, 300": stepped(),
        "AdamW foreach": stepped(foreach=True),
        "AdamW fused": stepped(fused=True),
    }


def show(title: str, table: dict[str, dict[str, float]]) -> None:
    """Print microseconds, ratios to plain torch, and microseconds above plain torch."""
    columns = (
        "plain us",
        "ours us",
        "DTensor us",
        "ours/plain",
        "DTensor/plain",
        "ours - plain",
        "DTensor - plain",
    )
    print(f"\n{title}\n{'':18}" + "".join(f"{name:>17}" for name in columns))
    for name, row in table.items():
        p, o, d = row["plain"], row["ours"], row["DTensor"]
        cells = (p, o, d, o / p, d / p, o - p, d - p)
        print(f"{name:18}" + "".join(f"{cell:17.2f}" for cell in cells), flush=True)


def makers_on(device: str) -> dict[str, Make]:
    """Name -> the function that makes a tensor of that kind from a tensor of this rank."""
    placement = consistent.placement.all(device)
    mesh = init_device_mesh(device, (dist.get_world_size(),))

    def ours(x: torch.Tensor, role: str) -> torch.Tensor:
        if role == "data":
            return consistent.from_local(x.to(device), placement, S(0))
        return consistent.distribute(x, placement, B)

    def dtensor(x: torch.Tensor, role: str) -> torch.Tensor:
        if role == "data":
            return DTensor.from_local(x.to(device), mesh, [Shard(0)], run_check=False)
        return distribute_tensor(x.to(device), mesh, [Replicate()])

    return {"plain": lambda x, role: x.to(device), "ours": ours, "DTensor": dtensor}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--only", choices=["ops", "models", "optimizers"], help="only this table")
    parser.add_argument("--seconds", type=float, default=0.02, help="per measurement")
    options = parser.parse_args(given)
    device = options.device
    torch.set_num_threads(1)
    start(device)
    makers = makers_on(device)
    where = torch.cuda.get_device_name() if device == "cuda" else "CPU"
    world = dist.get_world_size()
    head = f"torch {torch.__version__}, {where}, {world} rank(s), one thread each"
    for title, group in (
        (f"Ops, same shape every call ({head})", ops),
        ("Modules", models),
        ("Steps", optimizers),
    ):
        if options.only not in (None, group.__name__):
            continue
        made = {name: group(make) for name, make in makers.items()}
        table = {
            case: in_turn(
                {name: made[name][case] for name in makers},
                options.rounds,
                options.seconds,
                device,
            )
            for case in made["plain"]
        }
        if dist.get_rank() == 0:
            show(title, table)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
