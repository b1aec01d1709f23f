"""LeNet on handwritten digits, on all ranks and then on one: the same program, the same losses.

    torchrun --standalone --nproc_per_node 2 examples/mnist_lenet.py
    python examples/mnist_lenet.py            # a world of one rank

Look at ``PLAN`` and ``train``: model, optimizer and step are plain PyTorch. What makes them
parallel is one call of ``parallelize`` and the split of each batch: convolutions are data parallel
(parameters B, batch S(0)), the wide layer is model parallel (weight and bias S(0)). Dropout draws
the same mask under every plan.

Numbers are f64: in f32 the rounding of a sum sooner or later flips a relu or the winner of a
max-pool, and from there two runs of any program part by 1e-2. In f64 that does not happen, and the
curves show what the plan changes: nothing.
"""

from __future__ import annotations

import argparse
import os
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

import consistent
from consistent import S
from consistent.flow.data import Digits, load

PLAN = {"wide.*": S(0)}  # every other parameter is B
REPORTED_STEP = 1  # the first step also makes the optimizer's state


class LeNet(nn.Module):
    """i: [n, 1, 28, 28] -> logits [n, 10]."""

    def __init__(self, hidden: int = 512) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 5, padding=2)
        self.conv2 = nn.Conv2d(16, 32, 5)
        self.wide = nn.Linear(32 * 5 * 5, hidden)
        self.dropout = nn.Dropout(0.5)
        self.out = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.wide(x.flatten(1)))
        return self.out(self.dropout(x))


@dataclass
class History:
    """The results of a training run."""

    losses: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    seconds: float = 0.0
    report: consistent.Report | None = None


def train(
    digits: Digits, placement: consistent.Placement, args: argparse.Namespace, label: str
) -> History:
    """Train a new LeNet on ``placement``. Same seed, same data order, so the same losses on any."""
    torch.manual_seed(args.seed)
    model = consistent.parallelize(LeNet(), placement, PLAN)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    order = torch.Generator().manual_seed(args.seed)
    history = History()
    started = time.perf_counter()
    count = len(digits.train_labels)
    steps = args.epochs * -(-count // args.batch)
    bar = tqdm(total=steps, desc=label, disable=not is_first(), mininterval=0.5)
    for epoch in range(args.epochs):
        model.train()
        for batch in torch.randperm(count, generator=order).split(args.batch):
            images = consistent.distribute(digits.train_images[batch], placement, S(0))
            labels = consistent.distribute(digits.train_labels[batch], placement, S(0))
            reported = len(history.losses) == REPORTED_STEP
            with consistent.report() if reported else nullcontext() as report:
                optimizer.zero_grad()
                loss = F.cross_entropy(model(images), labels)
                loss.backward()
                optimizer.step()
            history.report = report or history.report
            history.losses.append(loss.item())
            bar.update()
        history.accuracy.append(accuracy(model, digits, placement, args.batch))
        if is_first():
            found = f"loss {history.losses[-1]:.4f}, test accuracy {history.accuracy[-1]:.2%}"
            tqdm.write(f"{label}: epoch {epoch + 1}, {found}")
    bar.close()
    history.seconds = time.perf_counter() - started
    return history


@torch.no_grad()
def accuracy(
    model: nn.Module, digits: Digits, placement: consistent.Placement, batch: int
) -> float:
    """The share of the test images that ``model`` classifies correctly."""
    model.eval()
    right = 0
    for images, labels in zip(digits.test_images.split(batch), digits.test_labels.split(batch)):
        logits = model(consistent.distribute(images, placement, S(0)))
        right += (logits.argmax(1) == consistent.distribute(labels, placement, S(0))).sum().item()
    return right / len(digits.test_labels)


def plot(path: Path, runs: dict[str, History]) -> None:
    """The loss curves, one above the other, as a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    for (label, run), style in zip(runs.items(), ("-", "--")):
        axes.plot(run.losses, style, label=f"{label}, {run.accuracy[-1]:.2%} right")
    axes.set(xlabel="step", ylabel="training loss", yscale="log", title="LeNet on digits")
    axes.legend()
    figure.savefig(path, dpi=120, bbox_inches="tight")


def is_first() -> bool:
    """Whether this process is the one that prints and writes files."""
    return not dist.is_initialized() or dist.get_rank() == 0


def summary(runs: dict[str, History], out: Path) -> None:
    """Print what happened and write it to ``out``."""
    label, main = next(iter(runs.items()))
    out.mkdir(parents=True, exist_ok=True)
    if main.report is not None:
        print(f"\none training step, {label}: what was boxed\n{main.report}\n")
        print(f"report: {main.report.save(out / 'report.html')}")
    plot(out / "loss.png", runs)
    print(f"plot: {out / 'loss.png'}")
    for label, run in runs.items():
        print(f"{label}: test accuracy {run.accuracy[-1]:.2%} in {run.seconds:.1f} s")
    if len(runs) == 2:
        first, second = runs.values()
        gap = max(abs(a - b) for a, b in zip(first.losses, second.losses))
        print(f"largest difference between the two loss curves: {gap:.1e}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--batch", type=int, default=64, help="images per step, over all ranks")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", choices=("float64", "float32"), default="float64")
    parser.add_argument(
        "--data", metavar="DIR", help="folder with the four MNIST files, plain or .gz"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="for report.html and loss.png"
    )
    parser.add_argument("--single-only", action="store_true", help="train on one rank only")
    parser.add_argument("--no-single", action="store_true", help="leave out the run on one rank")
    args = parser.parse_args()
    if args.epochs < 1 or args.batch < 1:
        parser.error(f"--epochs {args.epochs}, --batch {args.batch}: give at least 1 of each")
    return args


def main() -> None:
    """Train on all ranks, then on rank 0 alone; show both."""
    args = arguments()
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, args.dtype))
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    digits = load(args.data, args.seed)
    everywhere, one = consistent.Placement.all("cpu"), consistent.placement("cpu", ranks=[0])
    runs = {}
    if not args.single_only:
        label = f"{everywhere.size} ranks" if everywhere.size > 1 else "1 rank"
        runs[label] = train(digits, everywhere, args, label)
    if args.single_only or not args.no_single:
        runs["one rank alone"] = train(digits, one, args, "one rank alone")
    if is_first():
        summary(runs, args.out)
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
