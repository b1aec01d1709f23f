"""A step as it is simulated for this machine beside the same step on ranks: seconds, bytes, memory.

    python benchmarks/simulated.py
    python benchmarks/simulated.py --models mlp llama --rounds 30
    python benchmarks/simulated.py --hosts 2       ranks on two hosts: network namespaces
    CONSISTENT_SHARED_MEMORY=0 python benchmarks/simulated.py       ranks that send messages

Two ranks, one thread each, AdamW. Of each model the four plans are simulated; then all of them run
for real, a few steps of each in turn, round after round, so that what disturbs the host for a while
disturbs all alike. A step lasts as long as on its slowest rank; the median of its rounds counts,
and beside it stands the mean of their fastest quarter. Bytes are those that rank 0 sends in a step,
memory is that of its tensors, noted op by op.

Ops are timed when they are first met and kept in a file, so a second run simulates faster; with
--fresh all is measured again. The simulation knows nothing of the real steps. Before each turn both
ranks make a few fixed calls: "host" says how many times as long they took in the mean as the kept
figure says, that is how much slower than usual the host is, because of other guests or its clock;
"now" is the simulated time, times that, by the real one.
"""

from __future__ import annotations

import argparse
import math
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
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
from benchmarks.hosts import add_option, enter, hosts
from consistent import B, S
from consistent.auto.machines import machine
from consistent.auto.machines.host_speed import NOW_S, fixed_seconds
from consistent.auto.machines.this_machine import ThisMachine
from consistent.auto.simulation.real_memory import MemoryRecorder
from consistent.auto.simulation.report import SimulatedStep
from mirrored.transports.counting import counting
from mirrored.transports.default import current

RANKS, ROWS, IN_TURN = 2, 32, 4
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


def be_rank(rank: int, path: str, asked: Any, rounds: int, answers: Any) -> None:
    """Runs all pairs of a model and a plan, in turn."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    enter(rank, RANKS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=RANKS)
    current().shares(tuple(range(RANKS)), "cpu")  # what messages cost is measured
    answers.put(None)
    pairs = [Running(begin(name, plan)) for name, plan in asked.get()]
    for turn in range(-(-rounds // IN_TURN)):
        for pair in pairs:
            pair.turn(min(IN_TURN, rounds - turn * IN_TURN))
    found = [pair.real for pair in pairs]
    everyone: list[Any] = [None] * RANKS
    dist.all_gather_object(everyone, found)
    if rank == 0:
        answers.put([slowest(each) for each in zip(*everyone, strict=True)])
    dist.barrier()
    os._exit(0)


@dataclass(frozen=True)
class Real:
    """What steps of a rank took: seconds of each, and of the fixed calls before each turn; bytes
    that it sent in one, and the most that it held."""

    times: list[float]
    fixed: list[float]
    sent: int
    held: int

    @property
    def seconds(self) -> float:
        """The median of the rounds."""
        return statistics.median(self.times)

    @property
    def fastest(self) -> float:
        """The mean of the fastest quarter."""
        few = sorted(self.times)[: math.ceil(len(self.times) / 4)]
        return sum(few) / len(few)


class Running:
    """A pair on a rank, which is run a few steps at a time."""

    def __init__(self, step: Callable[[], None]) -> None:
        self._step = step
        with MemoryRecorder() as held:
            for _ in range(5):  # in the first ones ranks still compare plain values that ops meet
                step()
            held.reset_peak()
            with counting() as log:
                step()
        self.real = Real([], [], log.bytes, held.peak)

    def turn(self, steps: int) -> None:
        """Time so many steps, after one that finds the caches full of others' tensors."""
        dist.barrier()
        self.real.fixed.append(fixed_seconds(NOW_S))
        self._step()
        for _ in range(steps):
            dist.barrier()
            start = time.perf_counter()
            self._step()
            self.real.times.append(time.perf_counter() - start)


def slowest(ranks: Sequence[Real]) -> Real:
    """Of each step the slowest rank; bytes and memory are those of the first one."""
    times = [max(each) for each in zip(*(rank.times for rank in ranks), strict=True)]
    fixed = [x for rank in ranks for x in rank.fixed]
    return Real(times, fixed, ranks[0].sent, ranks[0].held)


def simulated(name: str, plan: str, count: int) -> SimulatedStep:
    """The step as it is simulated for so many hosts like this machine."""
    this = machine("this")
    assert isinstance(this, ThisMachine)
    with consistent.simulate(ranks=RANKS, machine=replace(this, hosts=count)) as sim:
        step = begin(name, plan)
        for _ in range(3):
            step()
    return sim.report()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--rounds", type=int, default=24)
    parser.add_argument("--fresh", action="store_true", help="measure all figures again")
    add_option(parser)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        if args.fresh:
            os.environ["XDG_CACHE_HOME"] = folder
        pairs = [(name, plan) for name in args.models for plan in PLANS]
        with hosts(args):
            compare(pairs, folder, args.rounds, args.hosts)


def compare(pairs: list[tuple[str, str]], folder: str, rounds: int, hosts: int) -> None:
    """Simulate all pairs, run them, and print both."""
    context = get_context("spawn")
    answers, asked = context.Queue(), [context.Queue() for _ in range(RANKS)]
    ranks = [
        context.Process(target=be_rank, args=(r, f"{folder}/store", asked[r], rounds, answers))
        for r in range(RANKS)
    ]
    for rank in ranks:
        rank.start()
    for _ in ranks:
        answers.get(timeout=600)
    steps = [simulated(name, plan, hosts) for name, plan in pairs]
    for queue in asked:
        queue.put(pairs)
    found = answers.get(timeout=1200)
    for rank in ranks:
        rank.join(30)
        rank.kill()
    print(
        f"{'':18}{'ms, real':>10}{'quarter':>9}{'simulated':>11}{'/ real':>8}{'host':>6}{'now':>6}"
        f"{'bytes, real':>14}{'simulated':>12}{'MiB, real':>11}{'simulated':>11}{'/ real':>8}"
    )
    made = [Pair(*pair, *each) for pair, *each in zip(pairs, found, steps, strict=True)]
    for pair in made:
        print(pair.row())
    conclude(made)


@dataclass(frozen=True)
class Pair:
    """A model under a plan, run and simulated."""

    name: str
    plan: str
    real: Real
    step: SimulatedStep

    @property
    def ratio(self) -> float:
        """Simulated seconds / real ones."""
        return self.step.seconds / self.real.seconds

    @property
    def host(self) -> float:
        """How many times as long as usual fixed calls took between its steps."""
        machine = self.step.machine
        assert isinstance(machine, ThisMachine) and machine.host_speed is not None
        return statistics.mean(self.real.fixed) / machine.host_speed.usual_seconds

    def row(self) -> str:
        """Its row of the table."""
        real, step, peak = self.real, self.step, self.step.peaks[0].bytes
        return (
            f"{self.name + ', ' + self.plan:18}{real.seconds * 1e3:10.2f}"
            f"{real.fastest * 1e3:9.2f}{step.seconds * 1e3:11.2f}"
            f"{self.ratio:8.2f}{self.host:6.2f}{self.ratio * self.host:6.2f}"
            f"{real.sent:14,}{step.bytes_of.get(0, 0):12,}"
            f"{real.held / 2**20:11.1f}{peak / 2**20:11.1f}{peak / real.held:8.2f}"
        )


NEAR = 0.05  # plans whose real times differ by less are as fast as each other


def conclude(pairs: Sequence[Pair]) -> None:
    """How near all of them are, and whether plans are ranked right."""
    now = [pair.ratio * pair.host for pair in pairs]
    for what, ratios in (("time", [pair.ratio for pair in pairs]), ("time, times host", now)):
        off = [abs(ratio - 1) for ratio in ratios]
        near = sum(x <= 0.15 for x in off)
        print(f"{what}: {near} of {len(off)} within 15 %, the furthest {max(off):.0%}")
    exact = sum(pair.step.bytes_of.get(0, 0) == pair.real.sent for pair in pairs)
    held = [abs(pair.step.peaks[0].bytes / pair.real.held - 1) for pair in pairs]
    print(f"bytes: {exact} of {len(pairs)} exact; memory: the furthest {max(held):.1%}")
    right, wrong = 0, []
    for a, b in combinations(pairs, 2):
        if a.name != b.name or abs(a.real.seconds / b.real.seconds - 1) <= NEAR:
            continue
        if (a.real.seconds < b.real.seconds) == (a.step.seconds < b.step.seconds):
            right += 1
        else:
            wrong.append(f"{a.name}: {a.plan} and {b.plan}")
    print(
        f"order of two plans of a model that differ by more than {NEAR:.0%}: {right} right", end=""
    )
    print(f", {len(wrong)} wrong {'; '.join(wrong)}")


if __name__ == "__main__":
    main()
