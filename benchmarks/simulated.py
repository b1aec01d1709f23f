"""A step as it is simulated for this machine beside the same step on ranks: seconds, bytes, memory.

    python benchmarks/simulated.py
    python benchmarks/simulated.py --models mlp llama --rounds 30

Two ranks, one thread each, AdamW. Memory is that of tensors, noted op by op; bytes are those that
rank 0 sends in a step. Ops are timed when they are first met and kept in a file, so a second run
simulates faster. On a busy machine the real steps are slower than the simulated ones: beside the
median of their time stands the least processor time of a rank, without what it waits for; in stages
a rank waits for the other, so it is left out there.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import consistent
from benchmarks.gpt import VOCAB
from benchmarks.graph import TOKENS, LeNet, SmallGpt
from consistent import B, S
from consistent.auto.simulation.holding import Holding
from mirrored.transports.counting import counting

RANKS, ROWS = 2, 32
PLANS = ("data", "zero3", "tensor", "two stages")


class Mlp(nn.Module):
    """Four layers that are wide enough to compute for a while."""

    def __init__(self) -> None:
        super().__init__()
        widths = (512, 2048, 2048, 2048, 10)
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in zip(widths, widths[1:]))

    def forward(self, x: Any) -> Any:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


class Llama(nn.Module):
    """The logits of a transformers Llama of four layers."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import LlamaConfig, LlamaForCausalLM

        self.model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=VOCAB,
                hidden_size=256,
                intermediate_size=512,
                num_hidden_layers=4,
                num_attention_heads=4,
                use_cache=False,
            )
        )

    def forward(self, tokens: Any) -> Any:
        return self.model(tokens).logits.flatten(0, 1)


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "mlp": (Mlp, ["layers.2"]),
    "lenet": (LeNet, ["layers"]),
    "gpt": (SmallGpt, ["blocks.1"]),
    "llama": (Llama, ["model.model.layers.2"]),
}


def batch(name: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets."""
    if name == "mlp":
        return torch.randn(256, 512), torch.randint(10, (256,))
    if name == "lenet":
        return torch.randn(256, 1, 28, 28), torch.randint(10, (256,))
    tokens = torch.randint(VOCAB, (ROWS, TOKENS))
    return tokens, tokens


def loss_of(out: Any, target: Any) -> Any:
    """The mean over rows or tokens."""
    return F.cross_entropy(out, target.flatten())


def begin(name: str, plan: str) -> Callable[[], None]:
    """A step, as it is written on ranks and in a simulation."""
    torch.manual_seed(0)
    make, split = MODELS[name]
    model, (x, y) = make(), batch(name)
    if plan == "two stages":
        places = [consistent.placement("cpu", [r]) for r in range(RANKS)]
        pipe = consistent.nn.pipeline(model, places, split=split, loss=loss_of, micro_batches=4)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

        def step() -> None:
            optimizer.zero_grad()
            pipe.step(x, y)
            optimizer.step()

        return step
    place = consistent.placement("cpu", range(RANKS))
    consistent.parallelize(model, place, plan, verbose=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    layout = B if plan == "tensor" else S(0)
    x, y = (consistent.distribute(t, place, layout) for t in (x, y))

    def step() -> None:
        optimizer.zero_grad()
        loss_of(model(x), y).backward()
        optimizer.step()

    return step


def be_rank(rank: int, path: str, names: list[str], rounds: int, answers: Any) -> None:
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    for name in names:
        for plan in PLANS:
            with Holding() as held:
                step = begin(name, plan)
                for _ in range(4):  # in which ranks still compare plain values that ops meet
                    step()
                held.forget()
                with counting() as log:
                    step()
            times, busy = [], []
            for _ in range(rounds):
                dist.barrier()
                start, own = time.perf_counter(), time.thread_time()
                step()
                times.append(time.perf_counter() - start)
                busy.append(time.thread_time() - own)
            if rank == 0:
                answers.put((name, plan, times, min(busy), log.bytes, held.peak))
    dist.barrier()
    os._exit(0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=20)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    context = get_context("spawn")
    answers = context.Queue()
    real = {}
    with tempfile.TemporaryDirectory() as folder:
        given = (f"{folder}/store", args.models, args.rounds, answers)
        ranks = [context.Process(target=be_rank, args=(r, *given)) for r in range(RANKS)]
        for rank in ranks:
            rank.start()
        for _ in range(len(args.models) * len(PLANS)):
            name, plan, *found = answers.get(timeout=600)
            real[name, plan] = found
        for rank in ranks:
            rank.join(30)
            rank.kill()
    print(f"{'':20}{'ms, real':>10}{'simulated':>11}{'/ real':>8}", end="")
    print(f"{'ms, busy':>10}{'/ busy':>8}{'bytes, real':>14}", end="")
    print(f"{'simulated':>12}{'MiB, real':>11}{'simulated':>11}{'/ real':>8}")
    ratios, against_busy = [], []
    for (name, plan), (times, busy, sent, held) in real.items():
        with consistent.simulate(ranks=RANKS, machine="this") as sim:
            step = begin(name, plan)
            for _ in range(3):
                step()
        made = sim.report()
        took = statistics.median(times)
        ratios.append(made.seconds / took)
        peak = made.peaks[0].bytes
        beside = ""
        if plan != "two stages":
            against_busy.append(made.seconds / busy)
            beside = f"{against_busy[-1]:8.2f}"
        print(
            f"{name + ', ' + plan:20}{took * 1e3:10.2f}{made.seconds * 1e3:11.2f}{ratios[-1]:8.2f}"
            f"{busy * 1e3:10.2f}{beside:>8}"
            f"{sent:14,}{made.bytes_of.get(0, 0):12,}{held / 2**20:11.1f}{peak / 2**20:11.1f}"
            f"{peak / held:8.2f}",
            flush=True,
        )
    for what, found in (("time", ratios), ("processor time", against_busy)):
        near = sum(abs(ratio - 1) <= 0.15 for ratio in found)
        far = max(abs(r - 1) for r in found)
        print(f"{what}: {near} of {len(found)} within 15 %, the furthest {far:.0%}")


if __name__ == "__main__":
    main()
