"""A byte-level language model on Python's own sources, which every machine has.

    torchrun --standalone --nproc_per_node 2 examples/train_gpt.py --plan zero3
    torchrun --standalone --nproc_per_node 4 examples/train_gpt.py --plan dp=zero3,tp=tensor
    python -m consistent run --nproc-per-node 4 examples/train_gpt.py --plan dp=data,fsdp=zero3

Look at ``train``: model, optimizer and step are plain PyTorch. Stop it in any way and start it
again, on any number of ranks and under any plan: it goes on from its last checkpoint, with the same
losses. Under ``torchrun --max-restarts 3`` it does so by itself when a rank dies, and under
``python -m consistent run`` the others go on from the same step; on SIGTERM it saves and leaves.
The curves are in ``out/train_gpt/loss.png``.
"""

from __future__ import annotations

import argparse
import os
import signal
import sysconfig
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset
from tqdm import tqdm

import consistent
from consistent import checkpoint
from consistent.data import Loader, LossMeter, loader
from consistent.elastic import Job

Row = tuple[int, float, float]  # step, loss, validation loss or NaN


class Block(nn.Module):
    """x: [n, t, width] -> [n, t, width]."""

    def __init__(self, width: int, heads: int, dropout: float = 0.0) -> None:
        super().__init__()
        self.heads, self.drop = heads, nn.Dropout(dropout)
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            project(y).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.query, self.key, self.value)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.drop(self.out(y.transpose(1, 2).flatten(2)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """ids: i64[n, t] -> logits [n, t, 256]."""

    def __init__(
        self, layers: int, width: int, heads: int, context: int, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads, dropout) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Windows(Dataset):
    """Item i: ``context`` bytes and the byte after each, u8 ``text`` cut into pieces."""

    def __init__(self, text: np.ndarray, context: int) -> None:
        self.text, self.context = text, context

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.context

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        start = index * self.context
        piece = torch.from_numpy(self.text[start : start + self.context + 1].astype(np.int64))
        return piece[:-1], piece[1:]


def sources(size: int) -> np.ndarray:
    """The first ``size`` bytes of the standard library's modules."""
    found, total = [], 0
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if total < size:
            found.append(np.fromfile(path, dtype=np.uint8))
            total += len(found[-1])
    return np.concatenate(found)[:size]


def layout(job: Job, text: str) -> tuple[consistent.Placement, Any]:
    """Placement and plan of ``--plan``. Of two axes the second has two ranks."""
    if "=" not in text:
        return job.placement(), text
    plan = dict(each.split("=") for each in text.split(","))
    sizes = dict(zip(plan, (-1, 2)))
    return job.placement(sizes, copies=2 if "data" in plan.values() else 1), plan


def train(job: Job, args: argparse.Namespace, log: Log) -> list[Row]:
    """Train until ``args.steps``; the rows of all steps, those before a restart included."""
    torch.manual_seed(args.seed)
    placement, plan = layout(job, args.plan)
    model = GPT(args.layers, args.width, args.heads, args.context, args.dropout)
    consistent.parallelize(model, placement, plan)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)

    text = sources(args.bytes)
    cut = len(text) * 9 // 10
    data, held_out = Windows(text[:cut], args.context), Windows(text[cut:], args.context)
    batches = loader(data, placement, batch_size=args.batch, shuffle=True, seed=args.seed)
    batches.stop_on(signal.SIGTERM)
    test = loader(held_out, placement, batch_size=args.batch)

    kept = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "batches": batches}
    folder = args.out / "checkpoints"
    history = [tuple(row) for row in job.keep(folder=folder, **kept).get("history", [])]
    again = log.goes_on(history)
    if history:
        more = f"; {again} steps run again" if again else ""
        say(f"goes on after step {len(history)}, on {placement}{more}")
    meter = LossMeter()
    bar = tqdm(total=args.steps, initial=len(history), disable=not is_first(), mininterval=0.5)
    saved, began = len(history), time.perf_counter()
    while len(history) < args.steps and not batches.stopped:
        for ids, wanted in batches:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten())
            meter(loss).backward()
            optimizer.step()
            scheduler.step()
            step = len(history) + 1
            checked = step % args.check_every == 0 or step == args.steps
            history.append((step, meter.value, validate(model, test) if checked else float("nan")))
            job.commit(history=history)
            log.write(history[-1])
            seconds = (time.perf_counter() - began) / (step - saved)
            bar.set_postfix(loss=meter.value, tokens_per_s=round(ids.numel() / seconds))
            bar.update()
            if step % args.save_every == 0 and step < args.steps:
                checkpoint.save(folder, step=step, wait=False, history=history, **kept)
            if step == args.steps:
                break
    bar.close()
    checkpoint.save(folder, step=len(history), history=history, **kept)
    if batches.stopped:
        say(f"asked to stop: saved after step {len(history)}")
    if is_first() and history:
        plot(args.out / "loss.png", history)
        print(f"step {history[-1][0]}: loss {history[-1][1]:.4f}, held out {history[-1][2]:.4f}")
    return history


@torch.no_grad()
def validate(model: nn.Module, test: Loader) -> float:
    """The mean loss on text that was held out."""
    model.eval()
    total = 0.0
    for ids, wanted in test:
        total += F.cross_entropy(model(ids).flatten(0, 1), wanted.flatten()).item() * len(ids)
    model.train()
    return total / len(test.dataset)


class Log:
    """A line of each step, exactly once, whichever process is the first one when the step ends."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def goes_on(self, history: list[Row]) -> int:
        """Let the file have the lines of these steps, and no others; how many are taken out.

        The process that wrote it may have ended between the end of a step and its line, or in the
        middle of the line. Lines that are taken out are of steps that run again.
        """
        if not is_first():
            return 0
        text = self.path.read_text() if self.path.exists() else ""
        lines = [line for line in text.splitlines(keepends=True) if line.endswith("\n")]
        kept = lines[: len(history)]
        new = self.path.with_suffix(".new")
        new.write_text("".join([*kept, *map(self.line, history[len(kept) :])]))
        new.replace(self.path)
        return len(lines) - len(kept)

    def write(self, row: Row) -> None:
        """Add the line of a step that all ranks have finished."""
        if is_first():
            with open(self.path, "a") as file:
                file.write(self.line(row))

    def line(self, row: Row) -> str:
        """What is written of a step."""
        return " ".join(map(str, row)) + "\n"


def plot(path: Path, history: list[Row]) -> None:
    """The curves, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    steps, losses, checks = (np.array(column) for column in zip(*history))
    known = ~np.isnan(checks)
    axes.plot(steps, losses, label="training")
    axes.plot(steps[known], checks[known], "o-", label="held out")
    axes.set(xlabel="step", ylabel="loss per byte (nats)", title="Python's sources")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def is_first() -> bool:
    """Whether this process is the one that prints and draws."""
    return not dist.is_initialized() or dist.get_rank() == 0


def say(text: str) -> None:
    """Print above the bar, once."""
    if is_first():
        tqdm.write(text)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--plan", default="data", help="zero3, tensor, dp=zero3,tp=tensor, ...")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=16, help="windows a step, over all ranks")
    parser.add_argument("--context", type=int, default=128, help="bytes a window")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--bytes", type=int, default=1 << 20, help="of text to read")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-every", type=int, default=50, metavar="STEPS")
    parser.add_argument("--check-every", type=int, default=100, metavar="STEPS")
    parser.add_argument("--out", type=Path, default=Path("out/train_gpt"))
    return parser.parse_args()


def start_group() -> None:
    """``init_process_group`` for a program that torchrun may start again. Its store lives on, and
    in it are addresses of processes that have ended, so each start has a part of its own."""
    count = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store, rank, size = next(dist.rendezvous("env://"))
    store = dist.PrefixStore(f"start-{count}", store)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=size)


def main() -> None:
    """Train, and draw the curves."""
    args = arguments()
    torch.set_num_threads(1)
    if "RANK" in os.environ:
        start_group()
    args.out.mkdir(parents=True, exist_ok=True)
    log = Log(args.out / "steps.txt")
    consistent.elastic.run(lambda job: train(job, args, log))
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
